"""Compares two runs on the documents both asked, cell by cell, and says in what the runs differ; needs no torch, writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .errors import UsageError, nearest
from .formats import Section, Told, Word
from .report import MEAN
from .runs import Answers, Cell, Run
from .sections import SIGNS, TONES, flat, points, unfinished
from .spots import Entry, Spot, furthest, judge, known, mean, spot
from .store import ASIDE

FIELDS = ("difference", "difference_low", "difference_high", "p", "p_holm", "significant", "verdict")
FINE = ("lost", "gained", "agreement", "kappa", "kl", "detectable", "furthest")  # of a task, not of the mean


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other: differences are the second's minus the first's. Accuracies are of 1; undefined is None."""

    titles: tuple[str, str]
    runs: tuple[str, str]  # digests
    margin: float  # of accuracy that the second may lose and still be ok
    incomplete: Mapping[str, list[str]]  # packs that A and B lack
    identities: list[Entry]  # what, a, b
    rows: list[Entry]  # one for each pair of cells and task, and for the mean

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON holds it."""
        return asdict(self)


def compare(first: Run, second: Run, cell_a: str | None = None, cell_b: str | None = None) -> Comparison:
    """Compare cells of one label, model and protocol, or the cell `cell_a` of the first run with `cell_b` of the second.

    A run's only model is matched with the other's only one, whatever their names. Raises UsageError where nothing matches, and where
    a document of the smaller run is not in the larger one with the same question and prompt.
    """
    margin = first.store.manifest["shown"]["margin"] / 100
    pairs = list(_pairs(first, second, cell_a or cell_b, cell_b or cell_a))
    rows = [row for side in dict.fromkeys(at for at, _, _ in pairs) for row in _side(first, second, pairs, side, margin)]
    if not rows:
        raise UsageError("the runs share no task that is whole in both: give runs of the same tasks, and finish them first")
    return Comparison(
        titles=(first.store.manifest["shown"]["title"], second.store.manifest["shown"]["title"]),
        runs=(first.store.digest, second.store.digest),
        margin=margin,
        incomplete={name: [str(pack) for pack in run.missing] for name, run in (("A", first), ("B", second))},
        identities=_differing(first, second),
        rows=rows,
    )


# Which cells, on which documents

Side = tuple[str, str]  # the first run's model, and the protocol


def _pairs(first: Run, second: Run, label_a: str | None, label_b: str | None) -> Iterator[tuple[Side, Cell, Cell]]:
    """The cells to compare."""
    renamed = _models(first, second)
    theirs = {(cell.model, cell.protocol, cell.label): cell for cell in second.cells}
    mine = [cell for cell in first.cells if label_a in (None, cell.label)]
    found = [
        ((cell.model, cell.protocol), cell, theirs[name])
        for cell in mine
        if (name := (renamed.get(cell.model, cell.model), cell.protocol, label_b or cell.label)) in theirs
    ]
    for run, label in ((first, label_a), (second, label_b)):
        labels = dict.fromkeys(cell.label for cell in run.cells)
        if label is not None and label not in labels:
            raise UsageError(f"{run.store.folder} has no cell {label!r}{nearest(label, labels)}: it has {', '.join(labels)}")
    if not found:
        raise UsageError(
            f"the runs share no cell: {_told(first)} against {_told(second)}; give runs of the same model and protocol, "
            "or name cells with --cell-a and --cell-b"
        )
    yield from found


def _models(first: Run, second: Run) -> dict[str, str]:
    """What the first run's model is called in the second, where each has but one."""
    ours, theirs = ({cell.model for cell in run.cells} for run in (first, second))
    return {ours.pop(): theirs.pop()} if len(ours) == len(theirs) == 1 else {}


def _told(run: Run) -> str:
    names = list(dict.fromkeys(f"{cell.model}/{cell.protocol}/{cell.label}" for cell in run.cells))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _side(first: Run, second: Run, pairs: Sequence[tuple[Side, Cell, Cell]], side: Side, margin: float) -> list[Entry]:
    """The rows of one model and protocol."""
    cells = [(a, b) for at, a, b in pairs if at == side]
    tasks = [
        task.name
        for task in first.tasks
        if all((a.key, task.name) in first.answers and (b.key, task.name) in second.answers for a, b in cells)
    ]
    if not tasks:
        return []
    columns: dict[str, list[tuple[Spot, Spot]]] = {task: _column(first, second, task, cells) for task in tasks}
    columns[MEAN] = [(mean([a for a, _ in row]), mean([b for _, b in row])) for row in zip(*columns.values(), strict=True)]
    for column in columns.values():
        judge([b for _, b in column], margin)
    return [
        {"model": side[0], "protocol": side[1], "cell_a": a.label, "cell_b": b.label, "task": task, **_row(*columns[task][place])}
        for place, (a, b) in enumerate(cells)
        for task in columns
    ]


def _row(base: Spot, other: Spot) -> Entry:
    accuracies = {"accuracy_a": base.entry["accuracy"], "accuracy_b": other.entry["accuracy"]}
    rest = {name: other.entry[name] for name in FIELDS} | {name: other.entry.get(name) for name in FINE}
    return {"n": other.difference.n if other.difference else None, **accuracies, **rest}


def _column(first: Run, second: Run, task: str, cells: Sequence[tuple[Cell, Cell]]) -> list[tuple[Spot, Spot]]:
    """Both sides of every pair of cells on one task."""
    clusters = _shared(first, second, task)
    labels = list(clusters.values()) if any(label is not None for label in clusters.values()) else None
    found = []
    for a, b in cells:
        base, other = (_at(run.answers[cell.key, task], list(clusters)) for run, cell in ((first, a), (second, b)))
        apart = furthest(base, other)
        compared = spot(base, other, labels)
        compared.entry["furthest"] = known(apart)
        found.append((spot(None, base, labels), replace(compared, same=apart == 0)))
    return found


def _shared(first: Run, second: Run, task: str) -> dict[int, str | None]:
    """Return the documents of the run that asked fewer, by doc_id, with what they share a passage with.

    Raises UsageError where one of them is not in the other run with the same question and prompt.
    """
    smaller, larger = sorted((_documents(first, task), _documents(second, task)), key=len)
    same = lambda one, two: two is not None and all(one[name] == two[name] for name in ("doc_hash", "prompt_hash"))  # noqa: E731
    differ = sum(not same(document, larger.get(doc_id)) for doc_id, document in smaller.items())
    if differ:
        raise UsageError(
            f"{task}: {differ} of {len(smaller)} documents of one run are not in the other with the same question and prompt, "
            "so nothing can be paired: give runs with the same data, few-shot examples and subset seed"
        )
    return {doc_id: document["cluster"] for doc_id, document in sorted(smaller.items())}


def _documents(run: Run, task: str) -> dict[int, dict[str, Any]]:
    return {document["doc_id"]: document for document in run.documents(task)}


def _at(answers: Answers, doc_ids: Sequence[int]) -> Answers:
    """Return the answers to some of the documents, in the order of `doc_ids`."""
    places = np.searchsorted(answers.doc_ids, doc_ids)
    metrics = {name: values[places] for name, values in answers.metrics.items()}
    return replace(
        answers, doc_ids=answers.doc_ids[places], logprobs=[answers.logprobs[place] for place in places], metrics=metrics
    )


def _differing(first: Run, second: Run) -> list[Entry]:
    """Return in what the runs' identities differ, but for their lists of cells: models, kernels, versions, the plan, the tasks' data."""
    ours, theirs = (_identity(run.store.manifest) for run in (first, second))
    names = dict.fromkeys([*ours, *theirs])
    return [{"what": name, "a": ours.get(name), "b": theirs.get(name)} for name in names if ours.get(name) != theirs.get(name)]


def _identity(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What is told of a run, flat: without its title, its cells and packs, and what stands aside."""
    told = {name: value for name, value in manifest.items() if name not in {"cells", *ASIDE}}
    models = [{name: value for name, value in model.items() if name != "packs"} for model in manifest["models"]]
    return flat({**told, "models": models})


# In words


def told(comparison: Comparison) -> Told:
    """Return a comparison as every format has it."""
    return Told(sections(comparison), comparison.rows, comparison.as_dict())


def sections(comparison: Comparison) -> list[Section]:
    """Return a table for each model and protocol, in what the runs differ, and how to read it."""
    titles = ", ".join(
        f"{name}: {title} (run {run})" for name, title, run in zip("AB", comparison.titles, comparison.runs, strict=True)
    )
    sides = dict.fromkeys((row["model"], row["protocol"]) for row in comparison.rows)
    header = ["cell", "task", "n", "A", "B", "B - A", "95 %", "lost", "gained", "agreement", "furthest", "verdict"]
    tables = [
        Section(f"{model}, protocol {protocol}", 2, header, [
            _words(row) for row in comparison.rows if (row["model"], row["protocol"]) == (model, protocol)
        ])
        for model, protocol in sides
    ]  # fmt: skip
    differ = [[Word(each["what"]), Word(each["a"] or "-"), Word(each["b"] or "-")] for each in comparison.identities]
    same = [] if differ else ["In nothing: model, kernel, versions, plan and data are the same."]
    apart = Section("In what the runs differ", 2, ["", "A", "B"] if differ else [], differ, same)
    missing = [f"{name}: {line}" for name, packs in comparison.incomplete.items() for line in unfinished(packs)]
    return [Section(titles, 1, lines=missing), *tables, apart, _legend(comparison)]


def _words(row: Entry) -> list[Word]:
    cell = row["cell_a"] if row["cell_a"] == row["cell_b"] else f"{row['cell_a']} / {row['cell_b']}"
    low, high = (limit if limit is None else points(limit) for limit in (row["difference_low"], row["difference_high"]))
    plain = lambda value, form="": "" if value is None else format(value, form)  # noqa: E731
    words = [
        cell, row["task"], plain(row["n"]), f"{100 * row['accuracy_a']:.1f}", f"{100 * row['accuracy_b']:.1f}",
        points(row["difference"]) + ("*" if row["significant"] else ""), f"{low} to {high}" if low and high else "not known",
        plain(row["lost"]), plain(row["gained"]), plain(row["agreement"], ".1%"), plain(row["furthest"], ".2g"),
    ]  # fmt: skip
    return [*map(Word, words), Word(SIGNS[row["verdict"]], TONES.get(row["verdict"], ""))]


LEGEND = (
    "Accuracy in percent on the documents that both runs asked; B - A in percentage points, with its 95 % interval.",
    "An asterisk: significant, p below 0.05 after Holm's adjustment over a task's cells, without those equal to the last bit.",
    (
        "Lost and gained: answers that are right in A alone and in B alone. Agreement: documents on which both pick the same answer. "
        "Furthest: the most that a log-likelihood differs, in nats; 0: equal to the last bit."
    ),
    "ok: the interval lies above {margin} points; worse: it lies below 0; ?: neither.",
)


def _legend(comparison: Comparison) -> Section:
    return Section("How to read it", 2, lines=[line.format(margin=points(-comparison.margin)) for line in LEGEND])
