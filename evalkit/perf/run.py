"""Runs a perf test: round after round in processes of their own, recorded as they end. Knows neither models nor statistics.

A run is its folder: the same command takes it up where it was left.
"""

from __future__ import annotations

import multiprocessing
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..fetch import DEFAULT
from ..manifest import versions
from ..store import PackName, locked, refuse_other
from .asked import Asked, Cell
from .machine import machine
from .records import KIND, OK, OUT_OF_MEMORY, Point, Points


@dataclass
class Perf:
    """What is asked, on its way into a folder."""

    asked: Asked
    folder: Path
    say: Any = field(default=lambda line: print(line, file=sys.stderr))

    def run(self) -> Points:
        """Measure what the folder lacks; return the finished run."""
        with ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            refuse_other(self.folder, self.identity)  # before a model is loaded
            store = Points.create(self.folder, self.manifest())
            assert isinstance(store, Points)
            for name in store.missing():
                points = self.round(int(name.task), name.number)
                store.write(name, {}, points)
                self.say(told(name, points))
            store.write_points()
        return store

    @property
    def identity(self) -> dict[str, Any]:
        """What is known of a run without its model."""
        return {"kind": KIND, "asked": self.asked.identity(), "cells": [asdict(cell) for cell in self.asked.cells]}

    def manifest(self) -> dict[str, Any]:
        """Return a run's manifest."""
        about = {"name": self.asked.model or DEFAULT, **described(self.asked)}
        return {
            **self.identity,
            "model": about,
            "hardware": machine(about["device"]),
            "versions": versions(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"system": platform.system(), "processor": platform.machine(), "python": platform.python_version()},
            "command": " ".join(["evalkit", *sys.argv[1:]]),
        }

    def round(self, at: int, repeat: int) -> list[Point]:
        """Measure every cell once; a cell whose process is killed ran out of memory, and the others go on without it."""
        found: dict[str, Point] = {}
        while left := [cell for cell in self.asked.turn(repeat) if cell.label not in found]:
            found |= turns(self.asked, at, left, look=repeat == 0)
        return [{"cell": cell.label, **found[cell.label]} for cell in self.asked.cells]


def told(name: PackName, points: Sequence[Point]) -> str:
    """Say that a round is done, and what did not fit."""
    short = ", ".join(point["cell"] for point in points if point["outcome"] != OK)
    return f"evalkit: {name.protocol} at {name.task}, round {name.number + 1}: done{f'; out of memory: {short}' if short else ''}"


def turns(asked: Asked, at: int, cells: Sequence[Cell], *, look: bool) -> dict[str, Point]:
    """Let cells have their turn in one process; return what it told of them: of all, unless it was killed."""
    from .child import Round

    found: dict[str, Point] = {}
    begun = ""
    for word, *rest in messages(Round(asked, at, cells, look)):
        match word:
            case "begins":
                (begun,) = rest
            case "took":
                found[rest[0]] = {"outcome": OK, **rest[1]}
            case "out of memory":
                found[rest[0]] = {"outcome": OUT_OF_MEMORY}
            case "killed" if begun and begun not in found and ends_for_memory(rest[0], capped=asked.memory_cap is not None):
                found[begun] = {"outcome": OUT_OF_MEMORY}
            case "killed":
                raise UsageError(
                    f"a measurement was ended by signal {rest[0]}; what was measured before is kept: give the command again"
                )
            case "kept":
                for label, share in rest[0].items():
                    found[label]["attention_kept"] = share
    return found


def ends_for_memory(number: int, *, capped: bool) -> bool:
    """Whether a signal is how the system ends a process that wants more memory; libraries abort at an allocation that a cap refuses."""
    return number == 9 or (capped and number in (6, 7, 11))


def described(asked: Asked) -> dict[str, Any]:
    """Return what identifies the model. Raises UsageError for what it refuses."""
    ((_, about),) = messages(asked)
    return dict(about)


def messages(job: Any) -> Iterator[tuple[Any, ...]]:
    """Start a process that works on a round; yield its messages, and ("killed", signal) where a signal ended it."""
    from .child import work

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(there, job), daemon=True)
    process.start()
    there.close()
    try:
        while True:
            try:
                message = here.recv()
            except EOFError:
                break
            if message[0] == "refused":
                raise UsageError(message[1])
            yield message
        process.join()
        if process.exitcode and process.exitcode < 0:
            yield "killed", -process.exitcode
        elif process.exitcode:
            raise UsageError("a measurement ended with the error above: what was measured before is kept")
    finally:
        process.kill()
        process.join()
