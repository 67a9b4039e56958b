"""Runs a retention test: chooses conversations, has every cell walk them, records pack by pack. Knows neither model nor statistics.

A run is its folder: the same command takes it up where it was left.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ..manifest import versions
from ..plan import FULL
from ..policies import build
from ..policy import Policy
from ..spread import Crews, alone, processes
from ..store import PackName, digest, locked, refuse_other
from .address import redacted
from .protocol import Asking, Bucket, Protocol, load
from .records import KIND, Records
from .scripts import Pack, Script

CONTROL = "control"  # the full cache, the fact never told
Cells = list[dict[str, Any]]  # as the manifest has them


def player(protocol: Protocol) -> Callable[[], Any]:
    """Return what makes the scorer of a protocol's model. Called where it works, it imports what loads models, which takes seconds."""
    return partial(_player, protocol)


def _player(protocol: Protocol) -> Any:
    from .player import Player

    return Player(protocol)


def prepared(protocol: Path | None, out: Path, given: Mapping[str, str | None], jobs: int = 1) -> Retention:
    """Return the test that the command line asks for."""
    return Retention(load(protocol, given), out, processes(jobs) if jobs > 1 else alone)


@dataclass
class Retention:
    """A protocol on its way into a folder."""

    protocol: Protocol
    folder: Path
    crews: Crews = alone
    loader: Callable[[Protocol], Callable[[], Any]] = player
    cells: Callable[[Protocol], Cells] = field(default=lambda protocol: listed(protocol))
    say: Callable[[str], None] = field(default=lambda line: print(line, file=sys.stderr))

    def run(self) -> Records:
        """Walk what the folder lacks; return the finished run."""
        cells = self.cells(self.protocol)  # what policies refuse is said before anything is loaded
        with ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            refuse_other(self.folder, {"kind": KIND, "protocol": self.protocol.identity()})  # before a model is loaded
            self.say(f"evalkit: opening {self.protocol.model or 'the recall model'}")
            crew = stack.enter_context(self.crews(self.loader(self.protocol)))
            chosen = {str(bucket): crew.call("scripts", bucket) for bucket in self.protocol.buckets}
            for bucket, scripts in chosen.items():
                self.say(made(bucket, scripts, self.protocol.conversations))
            store = Records.create(self.folder, manifest(self.protocol, crew.call("described"), chosen, cells))
            assert isinstance(store, Records)
            self.walk(store, crew, {script.id: script for scripts in chosen.values() for script in scripts})
            store.write_queries()
        return store

    def walk(self, store: Records, crew: Any, scripts: Mapping[str, Script]) -> None:
        """Walk the packs that are not recorded yet, those of the longest conversations first: several workers then end together."""
        work = {}
        for name in sorted(store.names(), key=lambda name: -Bucket.of(name.task)[1]):
            if self.lacks(store, name):
                cell = store.cell_of(name)
                policy = FULL if cell["control"] else cell["policy"].partition("(")[0]
                asked = Asking(policy, cell["budget"], tuple(cell["knobs"].items()), cell["control"])
                work[name] = Pack([scripts[one] for one in store.documents_of(name)], asked)
        with _progress() as bar:
            bar_id = bar.add_task("conversations", total=sum(len(pack.scripts) for pack in work.values()))
            start = time.monotonic()
            for name, walked in crew.scored(list(work.items())):
                store.record(name, walked, {"seconds": {"since": round(time.monotonic() - start, 2)}})
                bar.update(bar_id, advance=len(walked))

    def lacks(self, store: Records, name: PackName) -> bool:
        """Whether a pack is yet to be walked; a damaged one is set aside."""
        problem = store.whole(name)
        if problem:
            self.say(f"evalkit: {problem}")
            self.say(f"evalkit: it is now {store.set_aside(name)}, and its conversations are walked anew")
        return problem is not None


def made(bucket: str, scripts: Sequence[Script], wanted: int) -> str:
    """Say what a bucket's conversations are made of."""
    counts = {making: sum(script.making == making for script in scripts) for making in ("whole", "merged", "joined")}
    told = ", ".join(f"{count} {making}" for making, count in counts.items() if count)
    short = f" of {wanted} (the source has no more)" if len(scripts) < wanted else ""
    return f"evalkit: bucket {bucket}: {len(scripts)} conversations{short}: {told}"


# What is written down before anything is walked


def policies(protocol: Protocol) -> list[tuple[str, Policy]]:
    """Return the policies of a protocol by the names that tables use. Raises UsageError for what they refuse."""
    found = []
    for choice, budget in protocol.measured():
        knobs = ", ".join(f"{name}={value}" for name, value in choice.knobs.items())
        policy = build(choice.name, budget, **choice.knobs)
        policy.check("prompt")
        found.append((f"{choice.name}({knobs})" if knobs else choice.name, policy))
    return found


def manifest(
    protocol: Protocol, described: Mapping[str, Any], chosen: Mapping[str, Sequence[Script]], cells: Cells
) -> dict[str, Any]:
    """Return a run's manifest."""
    name = protocol.model or "recall"
    return {
        "kind": KIND,
        "protocol": protocol.identity(),
        "shown": {"margin": protocol.margin},
        "model": {"name": name, **described},
        "cells": cells,
        "buckets": [_bucket(bucket, scripts, protocol.together) for bucket, scripts in chosen.items()],
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.system(), "processor": platform.machine(), "python": platform.python_version()},
        "command": redacted(" ".join(["evalkit", *sys.argv[1:]])),
    }


def listed(protocol: Protocol) -> Cells:
    """Return a protocol's cells. Raises UsageError for what policies refuse."""
    found = [
        {
            "label": f"{name}@{policy.budget}",
            "policy": name,
            "budget": str(policy.budget),
            "knobs": policy.knobs,
            "control": False,
            "source": hashlib.sha256(Path(inspect.getfile(type(policy))).read_bytes()).hexdigest()[:16],
        }
        for name, policy in policies(protocol)
    ]
    return with_control(protocol, found)


def with_control(protocol: Protocol, cells: Cells) -> Cells:
    """Return cells with the control second, which is the first of them without having been told."""
    control = {**cells[0], "label": CONTROL, "policy": CONTROL, "control": True}
    return [cells[0], *([control] if protocol.control else []), *cells[1:]]


def _bucket(name: str, scripts: Sequence[Script], together: int) -> dict[str, Any]:
    """A bucket's conversations, by what they are made of and a digest of what is said, and its packs."""
    ids = [script.id for script in scripts]
    told = [
        {
            "id": script.id,
            "making": script.making,
            "sources": list(script.sources),
            "exchanges": len(script.exchanges),
            "fact": script.fact.id,
            "kind": script.fact.kind,
            "digest": digest([script.exchanges, {each.name: getattr(script.fact, each.name) for each in fields(script.fact)}]),
        }
        for script in scripts
    ]
    return {"name": name, "scripts": told, "packs": [ids[start : start + together] for start in range(0, len(ids), together)]}


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("walking"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip
