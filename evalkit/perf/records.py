"""A perf run's folder: what was asked, and a pack for each round, in which every cell had its turn at one place. Knows no model.

run.json                         the manifest: what is asked, model, machine, cells
packs/MODEL/KIND/AT/0000.jsonl   a round: a line for each cell, written whole or not at all
points.jsonl                     made of the packs: a record for each measurement
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..store import PackName, Store, write

KIND = "perf"
KINDS = ("ttft", "batch", "decode")  # what can be asked
SHORTEST = 4  # a batch's prompts have from this part of the longest one's tokens on
OK, OUT_OF_MEMORY = "ok", "out of memory"  # how a measurement ended
Point = dict[str, Any]


class Points(Store):
    """A perf run's folder and its manifest."""

    def names(self) -> list[PackName]:
        """Return all rounds, in the order in which they are measured."""
        asked = self.manifest["asked"]
        return [
            PackName(self.manifest["model"]["name"], asked["kind"], str(at), repeat)
            for at in asked["over"]
            for repeat in range(asked["repeats"])
        ]

    def documents_of(self, name: PackName) -> list[Any]:
        """Return the labels of the cells that have their turn in a round."""
        return [cell["label"] for cell in self.manifest["cells"]]

    def missing(self) -> list[PackName]:
        """Return the rounds that are not there."""
        return [name for name in self.names() if not self.has(name)]

    def points(self) -> Iterator[Point]:
        """Return all measurements, each with its cell, its place and its repeat."""
        for name in self.names():
            if self.has(name):
                for line in self.read(name)[1]:
                    yield {"at": int(name.task), "repeat": name.number, **line}

    def write_points(self) -> Path:
        """Write points.jsonl; return its path."""
        path = self.folder / "points.jsonl"
        write(path, "".join(json.dumps(point, ensure_ascii=False) + "\n" for point in self.points()))
        return path
