"""What an installation gives: a wheel and an editable install, each in a small environment of its own."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from pathlib import Path

import pytest

from evalkit import hook

ROOT = Path(__file__).parent.parent
ROOMS = [name for name in ("tasks", "retention", "budgets") if (ROOT / name).is_dir()]
RESOLVED = "from lm_eval.api.registry import get_model; print(get_model('kv_h2o').__mro__)"
SEEN = "import lm_eval.models; from lm_eval.api.registry import model_registry as seen; print('kv' in seen)"


class Environment:
    """A virtual environment that borrows every installed package but evalkit from the one running the tests."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
        # As a path line, so that the start-up files in there (an evalkit's too) do not run.
        (self.site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *words: str | Path) -> None:
        """Install into it with the pip of the running environment."""
        words = ("--python", self.python, "install", "--no-deps", "--no-build-isolation", "--quiet", *words)
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, env=clean(), capture_output=True)

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run its Python, away from the checkout; words are looked for in the environment's folder."""
        command = [self.python, *words]
        return subprocess.run(command, cwd=self.folder, env=clean(**variables), text=True, capture_output=True)


def clean(**variables: str) -> dict[str, str]:
    """The environment variables without those that decide what Python and evalkit find."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", hook.SWITCH)}
    return {**kept, "HF_HUB_OFFLINE": "1", **variables}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("kv_evalkit-*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.pip(wheel)
    return environment


@pytest.fixture(scope="session")
def editable(tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("editable"))
    environment.pip("--editable", ROOT)
    return environment


@pytest.fixture(params=["installed", "editable"])
def either(request) -> Environment:
    return request.getfixturevalue(request.param)


def test_the_wheel_holds_the_package_the_start_up_files_and_the_rooms(wheel) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"evalkit/_rooms/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.*")}
    assert ROOMS[0] == "tasks"
    assert {"evalkit.pth", "evalkit.start", "evalkit/cli.py", *shipped} <= names
    assert "evalkit/build_hook.py" not in names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "evalkit",
        "evalkit.pth",
        "evalkit.start",
    }


def test_the_entry_points_are_the_policies_folder(wheel) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        points = ConfigParser()
        points.read_string(archive.read(name).decode())
    assert dict(points["lm_eval.models"]) == hook.models()
    assert dict(points["console_scripts"]) == {"evalkit": "evalkit.cli:main"}


@pytest.mark.parametrize("constraints", ["constraints.txt", "constraints-vllm.txt"])
def test_what_builds_packages_is_pinned_too(constraints) -> None:
    """An environment's own setuptools may be too old to build what comes as source."""
    recipe = next(line for line in (ROOT / "Makefile").read_text().splitlines() if f"--constraint {constraints} hatchling" in line)
    pinned = {line.partition("==")[0] for line in (ROOT / constraints).read_text().splitlines()}
    builders = {"hatchling", "setuptools"}
    assert builders <= set(recipe.split()) & pinned


def test_both_start_up_files_name_the_hook() -> None:
    (line,) = (ROOT / "evalkit.pth").read_text().splitlines()
    assert line.startswith("import ")
    assert "from evalkit.hook import find_spec" in line
    assert (ROOT / "evalkit.start").read_text() == "evalkit.hook:install\n"


def test_lm_eval_resolves_a_model_by_its_name(either) -> None:
    done = either.run("-c", RESOLVED)
    assert "lm_eval.api.model.LM" in done.stdout, done.stderr


def test_child_processes_see_the_models_too(installed) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SEEN!r}])"
    assert installed.run("-c", child).stdout == "True\n"
    assert installed.run("-c", SEEN, EVALKIT_NO_HOOK="1").stdout == "False\n"


def test_both_command_lines_know_the_models(installed) -> None:
    # lm-eval takes long to answer, and answers an unknown name with the names it knows: both are asked at once.
    asked = [(["-m", "lm_eval"], ""), (["bin/evalkit", "lm-eval"], "1")]
    unknown = ["--model", "kv_none", "--tasks", "piqa"]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda ask: installed.run(*ask[0], *unknown, EVALKIT_NO_HOOK=ask[1]), asked)
    for done in answers:
        assert done.returncode != 0
        assert "no model for this name found" in done.stderr
        assert "kv_h2o" in done.stderr


def test_the_rooms_are_where_they_belong(installed, editable) -> None:
    code = "from evalkit.rooms import room; print(room('tasks'))"
    assert Path(installed.run("-c", code).stdout.strip()) == installed.site / "evalkit" / "_rooms" / "tasks"
    assert Path(editable.run("-c", code).stdout.strip()) == ROOT / "tasks"


def test_the_doctor_finds_an_installation_able(either) -> None:
    done = either.run("bin/evalkit", "doctor", "--json", EVALKIT_NO_HOOK="1")
    report = json.loads(done.stdout)
    findings = {finding["topic"]: finding for finding in report["findings"]}
    assert (done.returncode, report["able"]) == (0, True)
    assert findings["entry points"]["state"] == "ok"
    assert "EVALKIT_NO_HOOK" in findings["plain lm_eval"]["detail"]


def test_start_up_files_left_behind_are_silent(tmp_path) -> None:
    environment = Environment(tmp_path)
    (environment.site / "evalkit.pth").write_bytes((ROOT / "evalkit.pth").read_bytes())
    done = environment.run("-c", SEEN)
    assert (done.stdout, done.stderr) == ("False\n", "")
