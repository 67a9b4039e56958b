"""Makes of a retention run what tables, plots and pages show: accuracy, differences to full, survival. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Any

from .. import stats
from ..budget import Budget
from ..formats import as_csv
from ..likeness import kappa
from ..naming import placeless
from ..plan import FULL
from ..sections import spaced
from ..shares import acted
from ..spots import HALF, known
from ..store import ASIDE, Store, write
from .clusters import Clusters, clusters
from .records import KIND, Records

Query = Mapping[str, Any]
ALL = "all"  # the turns of a bucket together
SCORERS = {"contains": "contains", "fuzzy": "fuzzy", "first": "rank 1"}  # what a query has of each, and its name
MEANS = ("survival", "survival_told", "held", "read", "held_bytes", "acted", "context_tokens", "distance_tokens", "rank")
CHANGES = ("difference", "difference_low", "difference_high", "lost", "gained", "p", "p_holm", "significant", "verdict")
INSTRUMENT = (
    "The recall model is a test instrument, trained to recall, in part while reading little as InfiniGen and Quest do, and no language "
    "model: it shows what policies do, not how models fare."
)
UNASKED = (
    "{label}, {bucket}: {count} of {whole} queries were not asked, as replies had used up the model's positions. Differences to full are "
    "over queries that both were asked."
)
RESTATED = (
    "{label}, {bucket}: before {count} of {whole} queries the model had said the answer itself in a reply. Distance and survival are those "
    "of the statement."
)
SHARED = (
    "{bucket}: by parts and facts in common the conversations fall into {groups}, too few to reckon with. Intervals and p take each "
    "conversation as independent, so they may be too narrow."
)


@dataclass(frozen=True)
class Cell:
    """A policy at a budget, or the control."""

    policy: str
    budget: str | None  # None where it is a server's own
    control: bool

    @property
    def label(self) -> str:
        alone = self.control or self.policy == FULL or self.budget is None
        return self.policy if alone else f"{self.policy} {spaced(str(self.budget))}"


@dataclass(frozen=True)
class Report:
    """A run in numbers: a row for each cell, bucket and turn, and for all turns of a bucket."""

    manifest: Mapping[str, Any]
    queries: Sequence[Query]
    missing: int  # packs
    digest: str

    @classmethod
    def of(cls, store: Records) -> Report:
        """Read a run."""
        first = lambda query: None if query["rank"] is None else query["rank"] == 1  # noqa: E731
        did = lambda query: None if query["tally"] is None else acted(query["tally"])  # noqa: E731
        queries = [{**query, "first": first(query), "acted": did(query)} for query in store.queries()]
        return cls(store.manifest, queries, len(store.missing()), store.digest)

    @cached_property
    def cells(self) -> list[Cell]:
        """All cells, first the one that the others are compared with."""
        return [
            Cell(cell["label"] if cell["control"] else cell["policy"], cell["budget"], cell["control"])
            for cell in self.manifest["cells"]
        ]

    @cached_property
    def clusters(self) -> dict[str, Clusters]:
        """Each bucket's conversations by what they have in common."""
        return {bucket["name"]: clusters(bucket["scripts"]) for bucket in self.manifest["buckets"]}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of table.csv."""
        turns = [ALL, *self.manifest["protocol"]["turns"]]
        found = [
            self.row(cell, bucket["name"], turn) for bucket in self.manifest["buckets"] for turn in turns for cell in self.cells
        ]
        rows = [row for row in found if row["n"]]
        for together in (True, False):
            adjust([row for row in rows if (row["turn"] == ALL) == together])
        return rows

    @cached_property
    def _asked(self) -> dict[tuple[str, str | None, str], list[Query]]:
        """The queries of each policy, budget and bucket."""
        found: dict[tuple[str, str | None, str], list[Query]] = {}
        for query in self.queries:
            found.setdefault((query["policy"], query["budget"], query["bucket"]), []).append(query)
        return found

    def asked(self, cell: Cell, bucket: str, turn: int | str) -> list[Query]:
        """Return a cell's queries in a bucket, of a turn or of all."""
        return [query for query in self._asked.get((cell.policy, cell.budget, bucket), ()) if turn in (ALL, query["turn"])]

    def pairs(self, cell: Cell, bucket: str, turn: int | str) -> list[tuple[Query, Query]]:
        """Return what both full and a cell were asked in a bucket, at a turn or at all: full's query, the cell's."""
        full = {_where(query): query for query in self.asked(self.cells[0], bucket, turn)}
        return [(full[_where(query)], query) for query in self.asked(cell, bucket, turn) if _where(query) in full]

    def row(self, cell: Cell, bucket: str, turn: int | str) -> dict[str, Any]:
        """Return what a cell did in a bucket at a turn; shares are of 1, and what is undefined is None."""
        asked = self.asked(cell, bucket, turn)
        about = {"policy": cell.policy, "budget": cell.budget, "bucket": bucket, "turn": turn, "n": len(asked)}
        if not asked:
            return about
        right = [int(query["contains"]) for query in asked]
        found = stats.proportion(right, self._clustered(bucket, asked))
        interval = {"correct": sum(right), "accuracy": found.value, "low": known(found.low), "high": known(found.high)}
        scores = {"accuracy_fuzzy": _mean(asked, "fuzzy"), "accuracy_rank": _mean(asked, "first")}
        return {
            **about, **interval, **self.difference(cell, bucket, turn), **scores, **{name: _mean(asked, name) for name in MEANS},
        }  # fmt: skip

    def difference(self, cell: Cell, bucket: str, turn: int | str) -> dict[str, Any]:
        """Return a cell's difference to full, paired by query and clustered by conversation; its p is not adjusted yet.

        A cell that asks for everything and is right where full is, is the full cache itself: it is ok, and no hypothesis. Others are never
        ok where the policy acted on fewer than half of the queries, or where intervals may be too narrow.
        """
        pairs = [] if cell == self.cells[0] else self.pairs(cell, bucket, turn)
        if not pairs:
            return dict.fromkeys(CHANGES)
        before, after = ([int(pair[side]["contains"]) for pair in pairs] for side in (0, 1))
        found = stats.paired(before, after, self._clustered(bucket, [query for query, _ in pairs]))
        whole = cell.budget is not None and not cell.control and Budget.of(cell.budget).whole
        same = whole and not (found.lost or found.gained)
        did = _mean([query for _, query in pairs], "acted")
        weak = not self.clusters[bucket].whole or (did is not None and did < HALF)
        verdict = "ok" if same else stats.verdict(found, self.margin)
        verdict = "inconclusive" if verdict == "ok" and weak and not same else verdict
        p = None if same else known(found.p)
        values = (found.value, known(found.low), known(found.high), found.lost, found.gained, p, None, None)
        return dict(zip(CHANGES, (*values, None if cell.control else verdict), strict=True))

    def _clustered(self, bucket: str, queries: Sequence[Query]) -> list[str]:
        return [self.clusters[bucket].of[query["conversation"]] for query in queries]

    @property
    def margin(self) -> float:
        """The loss of accuracy, of 1, that still counts as none."""
        return float(self.manifest["shown"]["margin"]) / 100

    def kappas(self) -> dict[str, float | None]:
        """Return how far the scorers agree on all answers that both judged, the control's too: Cohen's kappa of each two."""
        return {f"{SCORERS[one]} and {SCORERS[other]}": self._kappa(one, other) for one, other in combinations(SCORERS, 2)}

    def _kappa(self, one: str, other: str) -> float | None:
        both = [(int(query[one]), int(query[other])) for query in self.queries if None not in (query[one], query[other])]
        return known(kappa(*zip(*both, strict=True))) if both else None

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON holds it: the same for the same packs, but for `aside`."""
        protocol, aside = self.manifest["protocol"], {"schema", "kind", "cells", "buckets", *ASIDE}
        return {
            "kind": KIND,
            "title": f"Retention, {self.manifest['model']['name']}",
            "notes": self.notes,
            "margin": self.margin,
            "turns": list(protocol["turns"]),
            "buckets": [self._bucket(bucket) for bucket in self.manifest["buckets"]],
            "cells": [
                {"policy": cell.policy, "budget": cell.budget, "label": cell.label, "full": cell == self.cells[0], "control": cell.control}
                for cell in self.cells
            ],
            "agreement": self.kappas(),
            "rows": self.rows,
            "missing_packs": self.missing,
            "provenance": placeless({"run": self.digest, **{name: value for name, value in self.manifest.items() if name not in aside}}),
            "aside": placeless({name: self.manifest.get(name) for name in sorted(ASIDE - {"shown"})}),
        }  # fmt: skip

    @property
    def notes(self) -> list[str]:
        """What has to be said before any number."""
        lengths = self.manifest["model"].get("lengths")  # of a server's model alone
        told = f"A server's cache: what it holds and reads is not known. Ranges and distances are in {lengths}; contexts, where it counts "
        counted = [f"{told}them, the server's own."] if lengths else []
        about = [INSTRUMENT] if self.manifest["protocol"]["model"] is None else counted
        return [*about, *self._of_replies()]

    def _of_replies(self) -> Iterator[str]:
        """What generated replies did to the queries after them."""
        asked = self.manifest["protocol"]
        turns = [turn for turn in asked["turns"] if turn >= asked["inject_at"]]
        for bucket, cell in product(self.manifest["buckets"], self.cells):
            queries, name = self.asked(cell, bucket["name"], ALL), bucket["name"]
            whole, restated = len(bucket["scripts"]) * len(turns), sum(query.get("restated", False) for query in queries)
            if asked["replies"] == "generate" and not self.missing and len(queries) < whole:
                yield UNASKED.format(label=cell.label, bucket=name, count=whole - len(queries), whole=whole)
            if restated:
                yield RESTATED.format(label=cell.label, bucket=name, count=restated, whole=len(queries))

    def _bucket(self, bucket: Mapping[str, Any]) -> dict[str, Any]:
        """What a bucket's conversations are made of, and what is to be said of their intervals."""
        found, name = self.clusters[bucket["name"]], bucket["name"]
        groups = f"{found.groups} group{'s' if found.groups > 1 else ''}"
        return {
            "name": name,
            "conversations": len(bucket["scripts"]),
            "wanted": self.manifest["protocol"]["conversations"],
            "context": _mean(self.asked(self.cells[0], name, ALL), "context_tokens"),  # that full's queries met
            "making": dict(Counter(script["making"] for script in bucket["scripts"])),
            "note": None if found.whole else SHARED.format(bucket=name, groups=groups),
        }


def adjust(rows: Sequence[dict[str, Any]]) -> None:
    """Write into rows of policies what Holm's adjustment over them all leaves of each p, and whether it is significant."""
    family = [row for row in rows if row["verdict"] is not None]
    adjusted = stats.holm([math.nan if row["p"] is None else row["p"] for row in family])
    for row, p in zip(family, adjusted.tolist(), strict=True):
        row.update(p_holm=known(p), significant=p < stats.LEVEL)


def _where(query: Query) -> tuple[str, int]:
    return query["conversation"], query["turn"]


def _mean(queries: Sequence[Query], name: str) -> float | None:
    values = [float(query[name]) for query in queries if query[name] is not None]
    return sum(values) / len(values) if values else None


def opened(folder: Path) -> Report | None:
    """Read a retention run, and write its table.csv; None for a folder that holds a run of another kind."""
    if Store.open(folder).manifest.get("kind") != KIND:
        return None
    report = Report.of(Records.open(folder))
    if report.rows:
        write(folder / "table.csv", as_csv(report.rows))
    return report
