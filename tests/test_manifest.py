"""A cell's key: everything that can change one of its numbers is in it, and nothing else."""

from typing import Any

import pytest

from evalkit import manifest
from evalkit.plan import DECISIVE, INDIFFERENT
from evalkit.policies import names
from evalkit.settings import Settings
from tests.stub import IDENTITY, planned

OTHER: dict[str, dict[str, Any]] = {
    "models.name": {"models": ["another"]},
    "models.args": {"models": [{"name": "stub", "args": {"revision": "x"}}]},
    "policies.name": {"policies": ["tova"]},
    "policies.knobs": {"policies": [{"name": "h2o", "knobs": {"every_step": True}}]},
    "policies.budgets": {"policies": [{"name": "h2o", "budgets": [0.3]}]},
    "budgets": {"budgets": [0.2]},
    "protocols": {"protocols": ["stream"]},
    "tasks": {"tasks": ["mini_copa", "mini_piqa"]},
    "fewshot": {"fewshot": 0},
    "prefix": {"prefix": True, "fewshot": 1},
    "limit": {"limit": 5},
    "noise_floor": {"noise_floor": True},
    "seeds.subset": {"seeds": {"subset": 1}},
    "seeds.fewshot": {"seeds": {"fewshot": 1}},
    "overlength": {"overlength": "skip"},
    "attn": {"attn": "eager"},
    "row_tokens": {"row_tokens": 2048},
    "prefill_chunk": {"prefill_chunk": 2048},
    "offload": {"offload": False},
    "shard": {"shard": 3},
    "title": {"title": "Another"},
    "margin": {"margin": 2},
    "reference": {"reference": {"source": "A", "rows": [{"policy": "h2o", "budget": 0.1, "task": "mini_copa", "accuracy": 1}]}},
}


def cells_of(plan: Any, digest: str = "", **identity: Any) -> list[dict[str, Any]]:
    """The cells of a plan, whose tasks and models are told and not loaded."""
    models = [(choice, {**IDENTITY, **identity}, {}) for choice in plan.models]
    return manifest.manifest(plan, models, [{"name": task, "digest": digest} for task in plan.tasks])["cells"]


def keys_of(plan: Any, **given: Any) -> set[str]:
    return {cell["key"] for cell in cells_of(plan, **given)}


BASE = {"policies": ["h2o"], "budgets": [0.1]}
CHOOSING = {"policies.name", "policies.knobs", "policies.budgets", "budgets"}  # add and leave out cells; full stays what it was


@pytest.mark.parametrize("name", sorted(DECISIVE | INDIFFERENT))
def test_every_field_of_a_plan_takes_its_side_in_the_keys(name):
    base, other = (keys_of(planned(**{**BASE, **changes})) for changes in ({}, OTHER[name]))
    assert (base == other) == (name in INDIFFERENT)
    if name in DECISIVE - CHOOSING:
        assert not base & other, "another plan's cell bears the same key"


def test_what_tasks_ask_and_expect_changes_every_key():
    assert not keys_of(planned(**BASE)) & keys_of(planned(**BASE), digest="another")


def test_every_setting_is_in_the_plan_or_said_by_the_worker():
    assert set(Settings.model_fields) == {"protocol", "attn", "overlength", "row_tokens", "prefill_chunk", "offload"}
    assert set(Settings.model_fields) - {"protocol"} <= DECISIVE
    assert "protocols" in DECISIVE


@pytest.mark.parametrize("name", sorted(IDENTITY))
def test_all_that_a_worker_says_of_its_model_changes_every_key(name):
    plan = planned(**BASE)
    assert not keys_of(plan) & keys_of(plan, **{name: "another"})


@pytest.mark.parametrize("package", ["torch", "transformers", "lm_eval", "evalkit"])
def test_versions_change_every_key(package, monkeypatch):
    before = keys_of(planned(**BASE))
    if package == "evalkit":
        monkeypatch.setattr(manifest, "__version__", "9.9.9")
    else:
        version = manifest.version
        monkeypatch.setattr(manifest, "version", lambda name: "9.9.9" if name == package else version(name))
    assert not before & keys_of(planned(**BASE))


@pytest.mark.parametrize("name", names())
def test_every_knob_of_every_policy_is_in_its_cells_keys(name):
    plan = planned(policies=[name], budgets=["100%"])
    (own,) = (cell for cell in cells_of(plan) if cell["policy"] == name)
    ((_, policy),) = [(label, built) for label, built in manifest.policies(plan) if label == name]
    assert own["knobs"] == policy.knobs


MINE = '''
from dataclasses import dataclass
from evalkit.policy import Policy, granted, last


@dataclass(frozen=True, kw_only=True)
class Newest(Policy):
    """Keep the newest entries."""

    def evict(self, cache, query):
        return cache.keep(last(cache, granted(cache)))
'''


def test_the_source_of_a_policy_changes_its_cells_and_no_other(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    plan = planned(policies=[str(file), "h2o"], budgets=[0.1])
    before = {cell["policy"]: cell["key"] for cell in cells_of(plan)}
    file.write_text(MINE + "\n# mended\n")
    after = {cell["policy"]: cell["key"] for cell in cells_of(plan)}
    assert {name for name in before if before[name] != after[name]} == {str(file)}
