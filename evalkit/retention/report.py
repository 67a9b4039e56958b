"""Makes of a retention run what tables show: accuracy by bucket and turn, differences to full, survival. Needs no torch, writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import isnan
from pathlib import Path
from typing import Any

from .. import stats
from ..formats import Section, Told, Word, as_csv
from ..likeness import kappa
from ..plan import FULL
from ..sections import SIGNS, TONES, flat, points, share, spaced
from ..store import ASIDE, Store, write
from .records import KIND, Records

Query = Mapping[str, Any]
ALL = "all"  # the turns of a bucket together
SCORERS = ("contains", "fuzzy", "first")
MEANS = ("survival", "survival_told", "held", "read", "context_tokens", "distance_tokens", "rank")


@dataclass(frozen=True)
class Cell:
    """A policy at a budget, or the control."""

    policy: str
    budget: str
    control: bool

    @property
    def label(self) -> str:
        return self.policy if self.control or self.policy == FULL else f"{self.policy} {spaced(self.budget)}"


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
        queries = [{**query, "first": query["rank"] == 1} for query in store.queries()]
        return cls(store.manifest, queries, len(store.missing()), store.digest)

    @cached_property
    def cells(self) -> list[Cell]:
        return [
            Cell(cell["label"] if cell["control"] else cell["policy"], cell["budget"], cell["control"])
            for cell in self.manifest["cells"]
        ]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of table.csv."""
        turns = [ALL, *self.manifest["protocol"]["turns"]]
        found = [
            self.row(cell, bucket["name"], turn) for bucket in self.manifest["buckets"] for turn in turns for cell in self.cells
        ]
        return [row for row in found if row["n"]]

    @cached_property
    def _asked(self) -> dict[tuple[str, str, str], list[Query]]:
        """The queries of each policy, budget and bucket."""
        found: dict[tuple[str, str, str], list[Query]] = {}
        for query in self.queries:
            found.setdefault((query["policy"], query["budget"], query["bucket"]), []).append(query)
        return found

    def asked(self, cell: Cell, bucket: str, turn: int | str) -> list[Query]:
        """Return a cell's queries in a bucket, of a turn or of all."""
        return [query for query in self._asked.get((cell.policy, cell.budget, bucket), ()) if turn in (ALL, query["turn"])]

    def row(self, cell: Cell, bucket: str, turn: int | str) -> dict[str, Any]:
        """Return what a cell did in a bucket at a turn; shares are of 1, and what is undefined is None."""
        asked = self.asked(cell, bucket, turn)
        about = {"policy": cell.policy, "budget": cell.budget, "bucket": bucket, "turn": turn, "n": len(asked)}
        if not asked:
            return about
        right = [int(query["contains"]) for query in asked]
        found = stats.proportion(right, [query["cluster"] for query in asked])
        scores = {"accuracy_fuzzy": _mean(asked, "fuzzy"), "accuracy_rank": _mean(asked, "first")}
        interval = {"correct": sum(right), "accuracy": found.value, "low": _known(found.low), "high": _known(found.high)}
        return {**about, **interval, **self.difference(cell, asked), **scores, **{name: _mean(asked, name) for name in MEANS}}

    def difference(self, cell: Cell, asked: Sequence[Query]) -> dict[str, Any]:
        """Return a cell's difference to full, paired by query and clustered by conversation."""
        names = ("difference", "difference_low", "difference_high", "lost", "gained", "p", "verdict")
        full = {_where(query): query for query in self.asked(self.cells[0], asked[0]["bucket"], ALL)}
        pairs = [(full[_where(query)], query) for query in asked if _where(query) in full]
        if cell == self.cells[0] or not pairs:
            return dict.fromkeys(names)
        before, after = ([int(pair[side]["contains"]) for pair in pairs] for side in (0, 1))
        found = stats.paired(before, after, [query["cluster"] for query, _ in pairs])
        values = (found.value, *map(_known, (found.low, found.high)), found.lost, found.gained, _known(found.p))
        verdict = None if cell.control else stats.verdict(found, self.manifest["shown"]["margin"] / 100)
        return dict(zip(names, (*values, verdict), strict=True))

    def kappas(self) -> dict[str, float | None]:
        """Return how far the scorers agree on all answers: Cohen's kappa of each two."""
        verdicts = {name: [int(query[name]) for query in self.queries] for name in SCORERS}
        return {f"{one} and {other}": _known(kappa(verdicts[one], verdicts[other])) for one, other in combinations(SCORERS, 2)}


def _where(query: Query) -> tuple[str, int]:
    return query["conversation"], query["turn"]


def _mean(queries: Sequence[Query], name: str) -> float | None:
    values = [float(query[name]) for query in queries if query[name] is not None]
    return sum(values) / len(values) if values else None


def _known(value: float) -> float | None:
    return None if isnan(value) else value


# In words


def retained(folder: Path) -> Told | None:
    """Return what is to be said of a retention run, and write its table.csv; None for a folder that holds no retention run."""
    if Store.open(folder).manifest.get("kind") != KIND:
        return None
    report = Report.of(Records.open(folder))
    write_table(report, folder)
    return told(report)


def told(report: Report) -> Told:
    """Return a report as every format has it."""
    value = {
        "provenance": _provenance(report),
        "making": {bucket["name"]: dict(_makings(bucket)) for bucket in report.manifest["buckets"]},
        "agreement": report.kappas(),
        "rows": report.rows,
        "missing_packs": report.missing,
    }
    return Told(list(sections(report)), report.rows, value)


def write_table(report: Report, folder: Path) -> Path:
    """Write table.csv into a run's folder; return its path."""
    path = folder / "table.csv"
    if report.rows:
        write(path, as_csv(report.rows))
    return path


def sections(report: Report) -> Iterator[Section]:
    """Yield a report's tables and what is to be said beside them."""
    model = report.manifest["model"]
    unfinished = [f"Not finished: {report.missing} packs of conversations are missing."] if report.missing else []
    yield Section(f"Retention, {model['name']}", 1, lines=[*unfinished, *_instrument(report)])
    if not report.rows:
        return
    buckets = [bucket["name"] for bucket in report.manifest["buckets"]]
    turns = report.manifest["protocol"]["turns"]
    by_bucket = lambda bucket: (bucket, ALL)  # noqa: E731
    yield _grid(report, "accuracy by context length", buckets, by_bucket, _accuracy, list(_made(report)))
    for bucket in buckets:
        at = lambda turn, bucket=bucket: (bucket, turn)  # noqa: E731
        yield _grid(report, f"accuracy by turn, {bucket}", turns, at, _accuracy, [])
    yield _grid(report, "what of the fact is held: the statement / the answer in it", buckets, by_bucket, _survival, list(SURVIVAL))
    for bucket in buckets:
        at = lambda turn, bucket=bucket: (bucket, turn)  # noqa: E731
        yield _grid(report, f"what of the fact is held by turn, {bucket}", turns, at, _survival, [])
    yield _grid(report, "held / read", buckets, by_bucket, lambda row: Word(f"{share(row['held'])} / {share(row['read'])}"), [])
    yield _grid(report, "by scorer: contains / fuzzy / rank", buckets, by_bucket, _scorers, list(_agreement(report)))
    yield Section(
        "How to read it", 2, lines=[line.format(margin=points(-report.manifest["shown"]["margin"] / 100)) for line in LEGEND]
    )
    yield Section("Where it comes from", 2, lines=[f"{name}: {value}" for name, value in flat(_provenance(report)).items()])


def _grid(
    report: Report,
    title: str,
    columns: Sequence[Any],
    at: Callable[[Any], tuple[str, int | str]],
    word: Callable[[Mapping[str, Any]], Word],
    lines: Sequence[str],
) -> Section:
    """A table with a row for each cell and a column for each bucket or turn."""
    rows = {(row["policy"], row["budget"], row["bucket"], row["turn"]): row for row in report.rows}
    table = []
    for cell in report.cells:
        found = [rows.get((cell.policy, cell.budget, *at(column))) for column in columns]
        table.append([Word(cell.label), *(word(row) if row else Word("") for row in found)])
    return Section(title, 3, ["policy", *(str(column) for column in columns)], table, lines)


def _accuracy(row: Mapping[str, Any]) -> Word:
    """An accuracy in percent; but for full's and the control's the difference in points, its asterisk and the verdict."""
    accuracy = f"{100 * row['accuracy']:.0f}"
    if row["verdict"] is None:
        low, high = row["low"], row["high"]
        return Word(accuracy if low is None else f"{accuracy} [{100 * low:.0f}, {100 * high:.0f}]")
    star = "*" if row["p"] is not None and row["p"] < stats.LEVEL else ""
    return Word(f"{accuracy} ({points(row['difference'])}{star}) {SIGNS[row['verdict']]}", TONES.get(row["verdict"], ""))


def _survival(row: Mapping[str, Any]) -> Word:
    return Word(f"{share(row['survival'])} / {share(row['survival_told'])}" if row["survival"] is not None else "-")


def _scorers(row: Mapping[str, Any]) -> Word:
    return Word(" / ".join(share(row[name]) for name in ("accuracy", "accuracy_fuzzy", "accuracy_rank")))


def _instrument(report: Report) -> list[str]:
    return [INSTRUMENT] if report.manifest["protocol"]["model"] is None else []


def _makings(bucket: Mapping[str, Any]) -> Counter[str]:
    return Counter(script["making"] for script in bucket["scripts"])


def _made(report: Report) -> Iterator[str]:
    """What each bucket's conversations are made of."""
    for bucket in report.manifest["buckets"]:
        counts, wanted = _makings(bucket), report.manifest["protocol"]["conversations"]
        kinds = ", ".join(f"{count} {making}" for making, count in counts.items())
        short = f" of {wanted} asked for" if counts.total() < wanted else ""
        yield f"{bucket['name']}: {counts.total()} conversations{short}: {kinds}."


def _agreement(report: Report) -> Iterator[str]:
    for pair, found in report.kappas().items():
        yield f"Cohen's kappa of {pair}: {'not defined' if found is None else f'{found:.2f}'}."


def _provenance(report: Report) -> dict[str, Any]:
    aside = {"schema", "kind", "cells", "buckets", *ASIDE}
    return {"run": report.digest, **{name: value for name, value in report.manifest.items() if name not in aside}}


INSTRUMENT = (
    "The recall model is a test instrument, trained to recall and for nothing else, and no language model: it shows what policies do, "
    "not how models fare."
)
SURVIVAL = ("A fact that is held and not recalled was not read, or not understood; one that is not held is forgotten.",)
LEGEND = (
    (
        "Accuracy in percent of queries whose answer contains what was asked for; in brackets the difference to full on the same "
        "queries, in percentage points, or a 95 % interval. Intervals and p are clustered by conversation."
    ),
    "An asterisk: p below 0.05, not adjusted for the number of cells.",
    "ok: the 95 % interval of the difference lies above {margin} points; worse: it lies below 0; ?: neither.",
    "control: the full cache, asked without having been told the fact. Its rate is the floor.",
    "whole: a conversation as it is; merged: several exchanges count as a turn; joined: several conversations one after the other.",
)
