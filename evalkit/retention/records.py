"""A retention run's folder: what was asked, and one record for each pack of conversations that was walked under a cell. Knows no model.

run.json                                   the manifest: protocol, model, cells, buckets with their conversations and packs
packs/MODEL/CELL/BUCKET/0000.jsonl         a pack: a line for each conversation with its queries, written whole or not at all
queries.jsonl, table.csv                   made of the packs: a record for each query, and the accuracies
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..shares import BYTES, DENSE_BYTES, HELD, REACH, READ, SPAN
from ..store import Damaged, PackName, Store, slug, write

Query = dict[str, Any]

KIND = "retention"
SHARES = {"held": (HELD, SPAN), "read": (READ, REACH), "held_bytes": (BYTES, DENSE_BYTES)}
SEALED = ("tally", "survival_heads", "logprobs")  # what a query's record has at its end


class Records(Store):
    """A retention run's folder and its manifest."""

    @classmethod
    def open(cls, folder: Path) -> Records:
        """Read a run's manifest. Raises UsageError where the folder holds none, or one of another kind."""
        store = super().open(folder)
        if store.manifest.get("kind") != KIND:
            raise UsageError(
                f"{folder} holds no retention run: give a folder that `evalkit retention --out` wrote, or an empty one"
            )
        return cls(folder, store.manifest)

    def names(self) -> list[PackName]:
        """Return all packs in the manifest's order: every cell's of the same conversations after one another."""
        return [
            PackName(self.manifest["model"]["name"], slug(cell["label"]), bucket["name"], number)
            for bucket in self.manifest["buckets"]
            for number in range(len(bucket["packs"]))
            for cell in self.manifest["cells"]
        ]

    def documents_of(self, name: PackName) -> list[Any]:
        """Return the ids of a pack's conversations."""
        (bucket,) = (bucket for bucket in self.manifest["buckets"] if bucket["name"] == name.task)
        return list(bucket["packs"][name.number])

    def cell_of(self, name: PackName) -> Mapping[str, Any]:
        """Return the cell that a pack is walked under."""
        (cell,) = (cell for cell in self.manifest["cells"] if slug(cell["label"]) == name.protocol)
        return cell

    def record(self, name: PackName, walked: Sequence[Sequence[Query]], header: Mapping[str, Any]) -> None:
        """Record a pack's queries, conversation by conversation."""
        lines = [{"conversation": one, "queries": own} for one, own in zip(self.documents_of(name), walked, strict=True)]
        self.write(name, header, lines)

    def whole(self, name: PackName) -> str | None:
        """Say what is wrong with a pack: nothing, None; that it is not there, an empty text."""
        if not self.has(name):
            return ""
        try:
            self.read(name)
        except Damaged as error:
            return str(error)
        return None

    def missing(self) -> list[PackName]:
        """Return the packs that are not there."""
        return [name for name in self.names() if not self.has(name)]

    def queries(self) -> Iterator[Query]:
        """Return all queries that were asked, each with its cell, its conversation and its fact."""
        scripts = {script["id"]: script for bucket in self.manifest["buckets"] for script in bucket["scripts"]}
        for name in self.names():
            if not self.has(name):
                continue
            about = {what: self.cell_of(name)[what] for what in ("policy", "budget", "control")}
            for line in self.read(name)[1]:
                script = scripts[line["conversation"]]
                told = {what: script[what] for what in ("fact", "kind", "making")}
                place = {"bucket": name.task, "conversation": script["id"], "sources": list(script["sources"])}
                for query in line["queries"]:
                    yield _ordered({**about, **place, **told, **query, **{part: share(query, part) for part in SHARES}})

    def write_queries(self) -> Path:
        """Write queries.jsonl; return its path."""
        path = self.folder / "queries.jsonl"
        write(path, "".join(json.dumps(query, ensure_ascii=False) + "\n" for query in self.queries()))
        return path


def _ordered(query: Query) -> Query:
    """A query's record, its long fields last."""
    return {name: query[name] for name in sorted(query, key=lambda name: name in SEALED)}


def share(query: Query, part: str) -> float | None:
    """Return which share of what the full cache would hold or read a query's fork held or read; None where nobody counted."""
    what, whole = SHARES[part]
    tally: list[float] | None = query["tally"]
    return tally[what] / tally[whole] if tally and tally[whole] else None
