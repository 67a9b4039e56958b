"""A run's folder: what was asked, and one record for each pack of documents that was scored; knows no model and no statistics.

    run.json                                the manifest: plan, models, cells, tasks and packs; the run's identity
    documents/TASK.jsonl                    what each document asks
    packs/MODEL/PROTOCOL/TASK/0000.jsonl    a pack: some documents under all cells, written whole or not at all

A pack is a function of the manifest alone, so a run that was killed and taken up again computes what it lacks just as it would have.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from .errors import UsageError

Run = TypeVar("Run")

SCHEMA = 1  # of everything in the folder; another one is refused
ASIDE = frozenset({"created", "machine", "command", "shown", "paged"})  # what a manifest says beside the run's identity


@dataclass(frozen=True)
class PackName:
    """Which documents of which task, under which model and protocol."""

    model: str
    protocol: str
    task: str
    number: int

    def path(self, folder: Path) -> Path:
        return folder / "packs" / slug(self.model) / self.protocol / slug(self.task) / f"{self.number:04d}.jsonl"

    def __str__(self) -> str:
        return f"{self.model}/{self.protocol}/{self.task}/{self.number:04d}"


@dataclass(frozen=True)
class Store:
    """A run's folder and its manifest."""

    folder: Path
    manifest: Mapping[str, Any]

    @classmethod
    def create(cls, folder: Path, manifest: Mapping[str, Any]) -> Store:
        """Begin a run in `folder`, or take up the one that is there. Raises UsageError where that one is another run."""
        written = {"schema": SCHEMA, **manifest}
        refuse_other(folder, identity(written))
        if not (folder / "run.json").exists():
            write(folder / "run.json", sealed(written))
        store = cls.open(folder)
        if manifest.get("shown") != store.manifest.get("shown"):  # another title or margin
            store = cls(folder, {**store.manifest, "shown": manifest.get("shown")})
            write(folder / "run.json", sealed(store.manifest))
        return store

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Read a run's manifest."""
        path = folder / "run.json"
        try:
            manifest = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise UsageError(f"{folder} holds no run (no run.json): give a folder that `evalkit sweep --out` wrote") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise UsageError(f"{path} is cut short or damaged: restore it, or start the run in another folder") from None
        if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
            found = manifest.get("schema") if isinstance(manifest, dict) else None
            raise UsageError(f"{path} is of schema {found}, not {SCHEMA}: use the evalkit that wrote it, or another folder")
        if manifest.pop("seal", None) != digest(manifest):
            raise UsageError(f"{path} was changed since it was written: restore it, or start the run in another folder")
        return cls(folder, manifest)

    @property
    def digest(self) -> str:
        """What every pack of this run bears."""
        return digest(identity(self.manifest))

    # Packs

    def names(self) -> list[PackName]:
        """Return all packs of the run, in the order in which they are scored."""
        return [
            PackName(model["name"], protocol, task["name"], number)
            for model in self.manifest["models"]
            for task in self.manifest["tasks"]
            for protocol in self.manifest["plan"]["protocols"]
            for number in range(len(model["packs"][task["name"]]))
        ]

    def documents_of(self, name: PackName) -> list[int]:
        """Return the doc_ids of a pack."""
        (model,) = (model for model in self.manifest["models"] if model["name"] == name.model)
        return list(model["packs"][name.task][name.number])

    def has(self, name: PackName) -> bool:
        return name.path(self.folder).is_file()

    def write(self, name: PackName, header: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> None:
        """Record a pack: a line of `header`, one for each cell, one that closes it."""
        head = {"pack": str(name), "run": self.digest, "documents": self.documents_of(name), **header}
        body = "".join(json.dumps(line) + "\n" for line in (head, *cells))
        write(name.path(self.folder), body + json.dumps({"cells": len(cells), "sha256": _sha(body)}) + "\n")

    def read(self, name: PackName) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return a pack's header and cells. Raises UsageError for one that is cut short, changed, or of another run."""
        path = name.path(self.folder)
        mend = "run the sweep again, which sets it aside and scores its documents anew"
        try:
            body, closing = _parted(path.read_text("utf-8"))
            whole = json.loads(closing)["sha256"] == _sha(body)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError):  # cut short, or no text of ours
            whole = False
        if not whole:
            raise Damaged(f"{path} is cut short or was changed: {mend}")
        head, *cells = (json.loads(line) for line in body.split("\n") if line)
        if head["run"] != self.digest or head["pack"] != str(name):
            raise Damaged(f"{path} belongs to another run ({head['pack']} of {head['run']}): {mend}")
        return head, cells

    def set_aside(self, name: PackName) -> Path:
        """Move a damaged pack out of the way; return where to."""
        path = name.path(self.folder)
        aside = path.with_suffix(".damaged")
        number = 1
        while aside.exists():
            number += 1
            aside = path.with_suffix(f".damaged{number}")
        path.rename(aside)
        return aside

    # Documents

    def write_documents(self, task: str, documents: Sequence[Mapping[str, Any]]) -> None:
        """Record what a task's documents ask; a file that says it already stays."""
        path = self.folder / "documents" / f"{slug(task)}.jsonl"
        text = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
        if not path.is_file() or path.read_bytes() != text.encode():
            write(path, text)

    def documents(self, task: str) -> list[dict[str, Any]]:
        """Return what a task's documents ask, in the order of their doc_ids."""
        path = self.folder / "documents" / f"{slug(task)}.jsonl"
        try:
            return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read ({error}): run the sweep again, or restore the file") from None


class Damaged(UsageError):
    """A pack that cannot be used."""


class OtherRun(UsageError):
    """A folder that holds another run than the one that is asked for."""


def refuse_other(folder: Path, known: Mapping[str, Any]) -> None:
    """Raise UsageError where `folder` holds other files, and OtherRun where it holds a run of which not all that is `known` is true."""
    if (folder / "run.json").exists():
        there = Store.open(folder).manifest
        if differing := _differing(dict(known), {name: there.get(name) for name in known}):
            raise OtherRun(f"{folder} holds another run ({differing}): give another folder, or what that run was started with")
    elif folder.is_dir() and any(not item.name.startswith(".") for item in folder.iterdir()):  # .lock, unfinished files
        raise UsageError(f"{folder} holds other files and no run.json: give an empty or a new folder")


def anew(folder: Path, run: Callable[[], Run], say: Callable[[str], None]) -> Run:
    """Return what `run` makes in `folder`; another run there is moved aside first."""
    try:
        return run()
    except OtherRun:
        place = folder.resolve()
        if Path.cwd().is_relative_to(place):  # the working folder goes where it is moved
            raise
        aside = next(path for n in count(1) if not (path := place.with_name(f"{place.name}.{n}")).exists())
        place.rename(aside)
        say(f"evalkit: {folder} held another run, which is now {aside}")
        return run()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, made if need be; UsageError where another process holds it or nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise UsageError(f"another process is writing to {folder}: wait for it, or give another folder") from None
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock:
        yield


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all: after a crash there is the old one or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise _unwritable(path, error) from error


def sealed(manifest: Mapping[str, Any]) -> str:
    """A manifest as its file has it, with a digest of all of it: an edited one would make numbers say what they do not."""
    return json.dumps({**manifest, "seal": digest(dict(manifest))}, indent=1) + "\n"


def _unwritable(path: Path, error: OSError) -> UsageError:
    what = "the disk is full; free some space and give the same command again" if error.errno == errno.ENOSPC else error.strerror
    return UsageError(f"cannot write {path}: {what}. What was finished before is kept")


def identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree for two manifests to be of one run."""
    return {name: value for name, value in manifest.items() if name not in ASIDE}


def digest(value: object) -> str:
    """A short digest of anything that JSON can hold."""
    return _sha(json.dumps(value, sort_keys=True, ensure_ascii=False))[:16]


def slug(name: str) -> str:
    """A name as a file may bear it."""
    plain = "".join(letter if letter.isalnum() or letter in "-_.@%" else "-" for letter in name).strip(".-")
    return plain if plain == name else f"{plain}-{_sha(name)[:6]}"


def _parted(text: str) -> tuple[str, str]:
    """Part a pack's text into what its last line vouches for, and that line."""
    body, _, closing = text.rstrip("\n").rpartition("\n")
    return f"{body}\n", closing


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _differing(ours: object, theirs: object, where: str = "") -> str:
    """Say where two JSON values differ first, or nothing."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in dict.fromkeys([*ours, *theirs]):
            if found := _differing(ours.get(name), theirs.get(name), f"{where}.{name}" if where else name):
                return found
        return ""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if found := _differing(mine, other, f"{where}.{number}"):
                return found
        return ""
    if ours == theirs:
        return ""
    say = lambda value: text if len(text := json.dumps(value)) < 60 else f"{text[:57]}..."  # noqa: E731
    return f"{where}: here {say(ours)}, there {say(theirs)}"
