"""A run's folder: what is written is whole or not there, what is damaged is told and kept, and nothing of two runs is mixed."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evalkit import store as stores
from evalkit.errors import UsageError
from evalkit.runs import Run
from evalkit.store import ASIDE, Damaged, OtherRun, PackName, Store, identity, locked, slug, write
from tests.fakes import manifest, write_run

NAME = PackName("smol", "prompt", "piqa", 1)
SMALL = {"documents": 8, "pack": 4}


@pytest.fixture
def store(tmp_path) -> Store:
    return write_run(tmp_path / "run", **SMALL)


def refusal(call, *given) -> str:
    """The line with which a call is refused."""
    with pytest.raises(UsageError) as caught:
        call(*given)
    line = str(caught.value)
    assert "\n" not in line
    return line


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder, but for the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# Packs


def test_a_pack_is_read_as_it_was_written(store):
    cells = [{"cell": "a", "logprobs": [[-1.5, float("-inf")]]}, {"cell": "b", "logprobs": [[-0.1, -2e-300]]}]
    store.write(NAME, {"seconds": {"total": 0.5}}, cells)
    head, found = store.read(NAME)
    assert found == cells
    assert (head["pack"], head["documents"], head["seconds"]) == ("smol/prompt/piqa/0001", [4, 5, 6, 7], {"total": 0.5})


def test_a_pack_cut_short_anywhere_is_damaged(store):
    path = NAME.path(store.folder)
    whole = path.read_bytes()
    for length in [*range(0, len(whole) - 1, 97), *range(len(whole) - 100, len(whole) - 1)]:
        path.write_bytes(whole[:length])
        with pytest.raises(Damaged, match=r"0001\.jsonl is cut short or was changed: run the sweep again, which sets it aside"):
            store.read(NAME)


def test_a_changed_byte_anywhere_is_noticed(store):
    path = NAME.path(store.folder)
    whole = path.read_bytes()
    for place in range(0, len(whole) - 2, 53):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(Damaged):
            store.read(NAME)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe", b"3\n", b"[]\n[]\n", b"null\n{}\n", b'{"a": 1}\n{"sha256": 3}\n'])
def test_what_is_no_pack_is_damaged(store, content):
    NAME.path(store.folder).write_bytes(content)
    with pytest.raises(Damaged):
        store.read(NAME)


def test_a_pack_of_another_run_is_refused(store, tmp_path):
    other = write_run(tmp_path / "other", model="smol", policies=("full", "h2o"), **SMALL)
    NAME.path(other.folder).replace(NAME.path(store.folder))
    with pytest.raises(Damaged, match=rf"belongs to another run \(smol/prompt/piqa/0001 of {other.digest}\): run the sweep again"):
        store.read(NAME)


def test_a_pack_in_another_ones_place_is_refused(store):
    NAME.path(store.folder).write_bytes(PackName("smol", "prompt", "boolq", 1).path(store.folder).read_bytes())
    with pytest.raises(Damaged, match=r"belongs to another run \(smol/prompt/boolq/0001 of "):
        store.read(NAME)


def test_a_run_with_a_damaged_pack_is_not_reported(store):
    path = NAME.path(store.folder)
    path.write_bytes(path.read_bytes()[:-9])
    assert refusal(Run.load, store.folder).startswith(f"{path} is cut short or was changed")


def test_a_pack_that_cannot_be_read_is_not_called_damaged(store, monkeypatch):
    monkeypatch.setattr(Path, "read_text", failing(errno.EIO))
    with pytest.raises(UsageError, match=r"0001\.jsonl cannot be read: Input/output error") as caught:
        store.read(NAME)
    assert not isinstance(caught.value, Damaged)


def test_every_damaged_pack_is_kept(store):
    kept = []
    for number in range(3):
        NAME.path(store.folder).write_text(f"damaged {number}")
        kept.append(store.set_aside(NAME))
        assert not store.has(NAME)
    assert [path.read_text() for path in kept] == ["damaged 0", "damaged 1", "damaged 2"]


def test_packs_are_told_apart_whatever_their_names(tmp_path):
    names = ["a/b", "a-b", "a b", "../a", "a", "A", ".a", "ä", "a.", ""]
    paths = {PackName(model, "prompt", task, 0).path(tmp_path) for model in names for task in names}
    assert len(paths) == len(names) ** 2
    assert all(path.resolve().is_relative_to(tmp_path / "packs") for path in paths)
    assert slug("h2o@10%") == "h2o@10%"


# Documents


def test_texts_of_every_kind_survive(store):
    texts = ["\u2028 and \u2029", "\x85 \x0b \x0c \x1c", "a\r\nb\rc\n", "\ufeff", "\U0001f600", '"\\', "\x00", "e\u0301"]
    told = [{"doc_id": number, "contexts": [text]} for number, text in enumerate(texts)]
    store.write_documents("kinds", told)
    assert store.documents("kinds") == told
    store.write(NAME, {"seconds": {}}, [{"cell": "a", "texts": texts}])
    assert store.read(NAME)[1] == [{"cell": "a", "texts": texts}]


def test_damaged_documents_are_told_and_written_anew(store):
    path = store.folder / "documents" / "piqa.jsonl"
    told = store.documents("piqa")
    path.write_bytes(path.read_bytes()[:-9])
    assert refusal(store.documents, "piqa").startswith(f"{path} cannot be read")
    store.write_documents("piqa", told)
    assert store.documents("piqa") == told


def test_documents_that_are_there_are_not_written_again(store):
    path = store.folder / "documents" / "piqa.jsonl"
    before = path.stat().st_ino
    store.write_documents("piqa", store.documents("piqa"))
    assert path.stat().st_ino == before


# Writing


def failing(number: int, after: int = 0):
    """A call that fails with an error of the system, from the `after`th time on."""
    calls = iter(range(10**6))

    def call(*given, **more):
        if next(calls) >= after:
            raise OSError(number, os.strerror(number))

    return call


def test_a_full_disk_is_one_line_and_what_was_there_stays(store, monkeypatch):
    before = everything(store.folder)
    monkeypatch.setattr(stores.os, "fsync", failing(errno.ENOSPC))
    line = refusal(store.write, NAME, {"seconds": {}}, [{"cell": "a"}])
    assert line == (
        f"cannot write {NAME.path(store.folder)}: the disk is full; free some space and give the same command again. "
        "What was finished before is kept"
    )
    assert everything(store.folder) == before


def test_a_disk_that_fills_up_while_a_file_is_replaced_loses_nothing(store, monkeypatch):
    before = everything(store.folder)
    monkeypatch.setattr(Path, "replace", failing(errno.ENOSPC))
    assert "the disk is full" in refusal(store.write, NAME, {"seconds": {}}, [{"cell": "a"}])
    assert everything(store.folder) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_one_line(tmp_path):
    tmp_path.chmod(0o500)
    assert refusal(write, tmp_path / "a" / "file", "text") == (
        f"cannot write {tmp_path / 'a' / 'file'}: Permission denied. What was finished before is kept"
    )


def test_a_read_only_file_system_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", failing(errno.EROFS))
    run = tmp_path / "run"
    with pytest.raises(UsageError, match=rf"cannot write {run}: Read-only file system\. What was"), locked(run):
        pass


def test_a_file_in_the_place_of_a_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert refusal(write, tmp_path / "file" / "run.json", "{}").startswith(f"cannot write {tmp_path / 'file' / 'run.json'}: ")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match=f"cannot write {folder}: "), locked(folder):
            pass
    assert (tmp_path / "file").read_text() == "mine"


def test_errors_inside_a_lock_are_not_taken_for_its_own(tmp_path):
    with pytest.raises(FileNotFoundError), locked(tmp_path):
        (tmp_path / "nothing").read_text()


HOLDER = """
import sys
from pathlib import Path
from evalkit.store import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"another process is writing to {tmp_path}: wait for it"), locked(tmp_path):
            pass
        first.kill()
        first.wait()
        with locked(tmp_path):
            pass


# The run's identity


@pytest.mark.parametrize("name", sorted(manifest()))
def test_a_run_is_taken_up_if_only_what_stands_aside_differs(store, name):
    given, before = {**manifest(**SMALL), name: "something else"}, everything(store.folder)
    if name in ASIDE:
        assert Store.create(store.folder, given).digest == store.digest
    else:
        line = refusal(Store.create, store.folder, given)
        assert line.startswith(f'{store.folder} holds another run ({name}: here "something else", there ')
        assert everything(store.folder) == before


def test_the_difference_is_named_where_it_is(store):
    given = manifest(**SMALL)
    given["models"] = [{**given["models"][0], "dtype": "float64"}]
    with pytest.raises(
        OtherRun, match=r'models\.0\.dtype: here "float64", there "float32"\): give another folder, or what that run'
    ):
        Store.create(store.folder, given)


def test_another_title_and_margin_are_taken_over(store):
    shown = {"title": "Another", "margin": 2.0, "reference": None}
    again = Store.create(store.folder, {**manifest(**SMALL), "shown": shown, "created": "later"})
    assert again.digest == store.digest
    written = Store.open(store.folder).manifest
    assert (written["shown"], written["created"]) == (shown, store.manifest["created"])
    assert again.read(NAME)[1]


def test_what_is_identity_is_what_is_not_aside():
    assert identity({"plan": 1, **dict.fromkeys(ASIDE, 2)}) == {"plan": 1}


# The folder


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    line = refusal(Store.create, tmp_path, manifest())
    assert line == f"{tmp_path} holds other files and no run.json: give an empty or a new folder"
    assert everything(tmp_path) == {"thesis.tex": b"mine"}


def test_what_a_killed_start_leaves_behind_is_no_other_file(tmp_path):
    for name in (".lock", ".run.json.123"):
        (tmp_path / name).write_text("{")
    assert Store.create(tmp_path, manifest()).names()


def test_files_beside_a_run_do_not_disturb_it(store):
    (store.folder / "notes.txt").write_text("mine")
    (NAME.path(store.folder).parent / "0001.jsonl.bak").write_text("mine")
    Store.create(store.folder, manifest(**SMALL))
    assert not Run.load(store.folder).missing


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "is cut short or damaged: restore it, or start the run in another folder"),
        ("", "is cut short or damaged: "),
        ("[]", "is of schema None, not 1: use the evalkit that wrote it, or another folder"),
        ("{}", "is of schema None, not 1: "),
        ('{"schema": 2}', "is of schema 2, not 1: "),
        (b"\xff", "is cut short or damaged: "),
    ],
)
def test_a_manifest_that_is_none_is_refused_and_kept(store, content, line):
    path, content = store.folder / "run.json", content if isinstance(content, bytes) else content.encode()
    path.write_bytes(content)
    for call in (lambda: Store.open(store.folder), lambda: Store.create(store.folder, manifest(**SMALL))):
        assert refusal(call).startswith(f"{path} {line}")
    assert path.read_bytes() == content


def test_a_folder_without_a_run_says_so(tmp_path):
    assert refusal(Store.open, tmp_path) == f"{tmp_path} holds no run (no run.json): give a folder that `evalkit sweep --out` wrote"


def test_the_manifest_is_plain_json(store):
    assert json.loads((store.folder / "run.json").read_text())["schema"] == stores.SCHEMA


@pytest.mark.parametrize(
    "edit", [lambda it: it.pop("models"), lambda it: it.pop("shown"), lambda it: it["cells"][0].update(budget="9%")]
)
def test_an_edited_manifest_is_refused_and_kept(store, edit):
    path = store.folder / "run.json"
    told = json.loads(path.read_text())
    edit(told)
    path.write_text(json.dumps(told))
    for call in (lambda: Store.open(store.folder), lambda: Store.create(store.folder, manifest(**SMALL))):
        assert refusal(call) == f"{path} was changed since it was written: restore it, or start the run in another folder"
    assert json.loads(path.read_text()) == told
