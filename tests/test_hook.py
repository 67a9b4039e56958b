"""The hook itself, in fresh interpreters; that an installation starts it is tested with the packaging."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evalkit import hook

ROOT = Path(__file__).parent.parent
SEEN = "import lm_eval.models; from lm_eval.api.registry import model_registry as seen; "


PTH = (ROOT / "evalkit.pth").read_text()
START = "from evalkit import hook; hook.install(); "


def run(code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that can import the checkout."""
    environment = {**os.environ, "EVALKIT_NO_HOOK": "", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=environment, text=True, capture_output=True)


def test_the_models_are_kv_one_for_each_policy_file_and_vllms() -> None:
    files = {path.stem for path in (ROOT / "evalkit" / "policies").glob("*.py") if not path.stem.startswith("_")}
    assert set(hook.models()) == {"kv", "kv_vllm"} | {f"kv_{name}" for name in files}
    assert hook.models()["kv_h2o"] == "evalkit.harness:kv_h2o"


@pytest.mark.parametrize("start", [PTH, START], ids=["pth", "start"])
@pytest.mark.parametrize(
    "first",
    [
        "",
        "import lm_eval.models.dummy; ",
        "from lm_eval.api.registry import get_model; get_model('dummy'); ",
        "import importlib.util; importlib.util.find_spec('lm_eval.models'); ",
    ],
)
def test_lm_eval_sees_the_models_beside_its_own_whatever_is_imported_first(start: str, first: str) -> None:
    done = run(start + first + SEEN + "from evalkit import hook; print({*hook.models(), 'hf'} <= set(seen))")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_environment_switches_it_off() -> None:
    assert run(PTH + SEEN + "print('kv' in seen, 'hf' in seen)", EVALKIT_NO_HOOK="1").stdout == "False True\n"


def test_registering_by_hand_needs_no_hook() -> None:
    by_hand = "from evalkit import hook; hook.register(); "
    done = run(by_hand + SEEN + "print({*hook.models(), 'hf'} <= set(seen))", EVALKIT_NO_HOOK="1")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_it_steps_aside_for_an_lm_eval_that_finds_plugins() -> None:
    newer = "import lm_eval.api.registry as r; r.load_plugins = print; "
    done = run(PTH + newer + SEEN + "print('kv' in seen, 'hf' in seen)")
    assert (done.stdout, done.stderr) == ("False True\n", "")


def test_a_name_that_is_taken_stays_as_it_is() -> None:
    taken = "from lm_eval.api.registry import model_registry as r; r.register('kv', target='other:Model'); "
    done = run(PTH + taken + SEEN + "print(dict(seen.items())['kv'], 'kv_h2o' in seen)")
    assert (done.stdout, done.stderr) == ("other:Model True\n", "")


def test_a_failure_is_one_line_and_lm_eval_goes_on() -> None:
    done = run(PTH + "from evalkit import hook; hook.models = lambda: 1 / 0; " + SEEN + "print('hf' in seen)")
    assert done.stdout == "True\n"
    assert done.stderr.startswith("evalkit: lm-eval cannot see the kv models (ZeroDivisionError")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("start", "imported"), [(PTH, []), (START, ["evalkit", "evalkit.hook"])], ids=["pth", "start"])
def test_the_start_of_an_interpreter_imports_next_to_nothing(start: str, imported: list[str]) -> None:
    code = f"import os, sys; before = set(sys.modules)\n{start}\nprint(sorted(set(sys.modules) - before))"
    # Without site, whose other start-up files might import a module before us; it always imports os.
    done = run(code, "-S")
    assert (done.stdout, done.stderr) == (f"{imported}\n", "")


def test_a_line_left_behind_without_evalkit_is_silent() -> None:
    gone = "import sys; sys.modules['evalkit'] = None; "
    done = run(PTH + gone + SEEN + "print('kv' in seen, 'hf' in seen)")
    assert (done.stdout, done.stderr) == ("False True\n", "")
