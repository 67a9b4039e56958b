"""Puts a retention report into words: tables by context length and turn, what is held, how to read it; computes nothing, knows no run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..formats import Section, Told, Word
from ..sections import SIGNS, TONES, flat, points, share
from .clusters import LEAST
from .report import ALL, Report

Entry = Mapping[str, Any]
Place = Callable[[Any], tuple[str, int | str]]  # a column's bucket and turn

SURVIVAL = "A fact that is held and not recalled was not read, or not understood; one that is not held is forgotten."
LEGEND = (
    (
        "Accuracy in percent of queries whose answer contains what was asked for; in brackets the difference to full on the same "
        "queries, in percentage points, or a 95 % interval. Intervals and p are clustered by conversation; those with a part or a fact in "
        "common are one cluster, as long as there are {least} clusters."
    ),
    (
        "An asterisk: the difference is significant, p below 0.05 after Holm's adjustment, over all policies and context lengths; "
        "in the tables by turn, over those of all turns."
    ),
    (
        "ok: the 95 % interval of the difference lies above {margin} points; worse: it lies below 0; ?: neither. Where the policy acted on "
        "fewer than half of the queries, or intervals may be too narrow, ? stands for ok."
    ),
    (
        "Conversations are sorted into ranges by their length in tokens (k: 1024), replies as the source has them: of the context at the "
        "last query, or of all of it under bucket_by conversation. Most queries come at shorter contexts, and count as much."
    ),
    "control: the full cache, asked without having been told the fact. Its rate is the floor.",
    "whole: a conversation as it is; merged: several exchanges count as a turn; joined: several conversations one after the other.",
)


def told(report: Report) -> Told:
    """Return a report as every format has it."""
    value = report.as_dict()
    return Told(list(sections(value)), report.rows, value)


def sections(value: Entry) -> Iterator[Section]:
    """Yield the tables of a report (the dict of `Report.as_dict`) and what is to be said beside them."""
    unfinished = [f"Not finished: packs of conversations missing: {value['missing_packs']}."] if value["missing_packs"] else []
    yield Section(value["title"], 1, lines=[*unfinished, *value["notes"]])
    if not value["rows"]:
        return
    names = [bucket["name"] for bucket in value["buckets"]]
    yield by_bucket(value)
    for name in names:
        yield _grid(value, f"accuracy by turn, {name}", value["turns"], partial(_of_turn, name), accuracy)
    if any(row["survival"] is not None for row in value["rows"]):  # a server shows nothing of its cache
        held = "what of the fact is held"
        yield _grid(value, f"{held}: the statement / the answer in it", names, _of_all, _survival, [SURVIVAL])
        for name in names:
            yield _grid(value, f"{held} by turn, {name}", value["turns"], partial(_of_turn, name), _survival)
    if any(row["held"] is not None for row in value["rows"]):
        yield _grid(value, "held / read / bytes held", names, _of_all, partial(_shares, ("held", "read", "held_bytes")))
    scorers = ("accuracy", "accuracy_fuzzy", "accuracy_rank")
    yield _grid(value, "by scorer: contains / fuzzy / rank", names, _of_all, partial(_shares, scorers), list(_agreement(value)))
    margin = points(-value["margin"])
    yield Section("How to read it", 2, lines=[line.format(margin=margin, least=LEAST) for line in LEGEND])
    yield Section("Where it comes from", 2, lines=[f"{name}: {each}" for name, each in flat(value["provenance"]).items()])


def by_bucket(value: Entry) -> Section:
    """Return a report's main table: accuracy by context length, and what the conversations are made of."""
    names = [bucket["name"] for bucket in value["buckets"]]
    return _grid(value, "accuracy by context length", names, _of_all, accuracy, list(_made(value)))


def _of_all(bucket: str) -> tuple[str, int | str]:
    return bucket, ALL


def _of_turn(bucket: str, turn: int) -> tuple[str, int | str]:
    return bucket, turn


def _grid(
    value: Entry, title: str, columns: Sequence[Any], at: Place, word: Callable[[Entry], Word], lines: Sequence[str] = ()
) -> Section:
    """A table with a row for each cell and a column for each bucket or turn."""
    rows = {(row["policy"], row["budget"], row["bucket"], row["turn"]): row for row in value["rows"]}
    table = []
    for cell in value["cells"]:
        found = [rows.get((cell["policy"], cell["budget"], *at(column))) for column in columns]
        table.append([Word(cell["label"]), *(word(row) if row else Word("") for row in found)])
    return Section(title, 3, ["policy", *map(str, columns)], table, lines)


def accuracy(row: Entry) -> Word:
    """An accuracy in percent; but for full's and the control's the difference in points, its asterisk and the verdict."""
    percent = f"{100 * row['accuracy']:.0f}"
    if row["verdict"] is None:
        low, high = row["low"], row["high"]
        return Word(percent if low is None else f"{percent} [{100 * low:.0f}, {100 * high:.0f}]")
    star = "*" if row["significant"] else ""
    return Word(f"{percent} ({points(row['difference'])}{star}) {SIGNS[row['verdict']]}", TONES.get(row["verdict"], ""))


def _survival(row: Entry) -> Word:
    return Word("-" if row["survival"] is None else f"{share(row['survival'])} / {share(row['survival_told'])}")


def _shares(names: Sequence[str], row: Entry) -> Word:
    return Word(" / ".join(share(row[name]) for name in names))


def _made(value: Entry) -> Iterator[str]:
    """What each bucket's conversations are made of, and what that does to their intervals."""
    for bucket in value["buckets"]:
        kinds = ", ".join(f"{count} {making}" for making, count in bucket["making"].items())
        short = f" of {bucket['wanted']} asked for" if bucket["conversations"] < bucket["wanted"] else ""
        met = "" if bucket["context"] is None else f" A query met {bucket['context']:.0f} tokens on average."
        yield f"{bucket['name']}: {bucket['conversations']} conversations{short}: {kinds}.{met}"
        if bucket["note"]:
            yield bucket["note"]


def _agreement(value: Entry) -> Iterator[str]:
    for pair, found in value["agreement"].items():
        yield f"Cohen's kappa of {pair}, over all rows: {'not defined' if found is None else f'{found:.2f}'}."
