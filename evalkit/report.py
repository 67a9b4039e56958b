"""Makes of a run what tables, plots and pages show: accuracy, differences to the full cache, knees; needs no torch, writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from . import stats
from .budget import Budget
from .errors import UsageError
from .naming import placeless
from .runs import Answers, Cell, Run, Task
from .spots import HALF, Clusters, Entry, Spot, furthest, judge, known, mean, spot
from .store import ASIDE

MEAN = "mean"  # of the tasks, in the place of a task's name
SHARES = ("held", "read", "held_bytes", "acted")


@dataclass(frozen=True)
class Report:
    """A run in numbers. Accuracies and shares are of 1, log-likelihoods in nats; what is undefined is None."""

    title: str
    provenance: Mapping[str, Any]
    margin: float  # of accuracy that a cell may lose and still be ok
    reference: Mapping[str, Any] | None  # published numbers: source, note, rows (in percent)
    incomplete: list[str]  # packs that are not there yet
    groups: list[Entry]  # one for each model and protocol
    aside: Mapping[str, Any]  # what may differ between two runs of one plan: when, where and how long

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON holds it."""
        return asdict(self)


def report(run: Run) -> Report:
    """Compare every cell of a run with the full cache, on the tasks whose packs are all there.

    Raises UsageError where no task is whole yet, and where a model has no full cell under a protocol.
    """
    manifest, shown = run.store.manifest, run.store.manifest["shown"]
    margin = shown["margin"] / 100
    sides = dict.fromkeys((cell.model, cell.protocol) for cell in run.cells)
    groups = [found.as_dict() for side in sides if (found := _group(run, *side, margin))]
    if not groups:
        raise UsageError(
            f"{run.store.folder} has no task whose packs are all there (missing: {len(run.missing)}): "
            "give the command that started the run again, then this one"
        )
    return Report(
        title=shown["title"],
        provenance=_provenance(run),
        margin=margin,
        reference=shown["reference"],
        incomplete=[str(name) for name in run.missing],
        groups=groups,
        aside=placeless({name: manifest.get(name) for name in sorted(ASIDE - {"shown", "paged"})})
        | {"seconds": run.seconds, "computed_tokens": run.tokens},
    )


def _provenance(run: Run) -> Entry:
    """Where the numbers come from: the manifest without its lists of cells, tasks and packs, and without what stands aside."""
    manifest = run.store.manifest
    models = [{name: value for name, value in model.items() if name != "packs"} for model in manifest["models"]]
    told = {name: value for name, value in manifest.items() if name not in {"schema", "cells", "tasks", *ASIDE}}
    return dict(placeless({"run": run.store.digest, **told, "models": models}))


# One model under one protocol


def _group(run: Run, model: str, protocol: str, margin: float) -> _Group | None:
    """Return what was measured of one side of the run; None while none of its tasks is whole."""
    cells = [cell for cell in run.cells if (cell.model, cell.protocol) == (model, protocol)]
    fulls = [cell for cell in cells if cell.full]
    if not fulls:
        raise UsageError(
            f"{run.store.folder} has no full cell for {model} under protocol {protocol}, so there is nothing to compare with: "
            "put full among the plan's policies"
        )
    tasks = [task for task in run.tasks if (fulls[0].key, task.name) in run.answers]
    return _Group(run, fulls[0], fulls[1:], [cell for cell in cells if not cell.full], tasks, margin) if tasks else None


@dataclass(frozen=True)
class _Group:
    """The cells of one model under one protocol; a second full cell (`again`, batched otherwise) gives the noise floor."""

    run: Run
    full: Cell
    again: list[Cell]
    others: list[Cell]
    tasks: list[Task]
    margin: float

    def as_dict(self) -> Entry:
        cells = [self.full, *self.others]
        columns = {task.name: self._column(task, cells) for task in self.tasks}
        columns[MEAN] = [mean(row) for row in zip(*columns.values(), strict=True)]
        for column in columns.values():
            judge(column, self.margin)
        shown = [
            self._cell(cell, {name: column[place].entry for name, column in columns.items()}) for place, cell in enumerate(cells)
        ]
        return {
            "model": self.full.model,
            "protocol": self.full.protocol,
            "tasks": [self._task(task) for task in self.tasks],
            "cells": shown,
            "knees": [_knee(row, name) for row in _by_policy(shown).values() for name in columns],
            "pareto": {cost: _front(shown, at) for cost, at in (("bytes", "held_bytes"), ("read", "read"), ("seconds", "seconds"))},
            "noise": self._noise(self.again[0]) if self.again else None,
        }

    def _task(self, task: Task) -> Entry:
        costs = self._answers(self.full, task).costs
        return {
            **{name: getattr(task, name) for name in ("name", "digest", "total", "subset", "chance")},
            "n": task.documents,
            "metrics": list(task.metrics),
            **{name: costs[name] for name in ("truncated", "skipped")},
            "paged": self._paged(task),
        }

    def _paged(self, task: Task) -> Entry | None:
        """What all prompts take at once in blocks, and what each cell held of them; None for runs that did not count it.

        Left out are cells that hold something else than the prompts, such as simulations of prompts with their answers.
        """
        stored = self.run.store.manifest.get("paged", {}).get(self.full.model, {}).get(task.name)
        if stored is None:
            return None
        costs = {cell.label: self._answers(cell, task).costs for cell in (self.full, *self.others)}
        same = {label: cost["bytes"] for label, cost in costs.items() if cost["dense_bytes"] == stored["stored_bytes"]}
        return {**stored, "held": same}

    def _answers(self, cell: Cell, task: Task) -> Answers:
        return self.run.answers[cell.key, task.name]

    @cached_property
    def _floors(self) -> dict[str, set[str]]:
        return {cell["key"]: set(cell["floors"]) for cell in self.run.store.manifest["cells"]}

    def _column(self, task: Task, cells: Sequence[Cell]) -> list[Spot]:
        """All cells on one task."""
        labels = {document["doc_id"]: document["cluster"] for document in self.run.documents(task.name)}
        clusters = [labels[doc_id] for doc_id in self._answers(self.full, task).doc_ids.tolist()]
        return [self._spot(cell, task, clusters if any(label is not None for label in clusters) else None) for cell in cells]

    def _spot(self, cell: Cell, task: Task, clusters: Clusters) -> Spot:
        base = None if cell.full else self._answers(self.full, task)
        answers = self._answers(cell, task)
        greyed = _idle(cell, answers)
        weak = greyed or task.name in self._floors[cell.key]
        found = spot(base, answers, clusters, whole=Budget.of(cell.budget).whole, weak=weak)
        found.entry.update({name: answers.costs[name] for name in SHARES}, greyed=greyed)
        found.entry["reference"] = _published(self.run.store.manifest["shown"]["reference"], cell, task)
        return found

    def _cell(self, cell: Cell, entries: Mapping[str, Entry]) -> Entry:
        """One cell over all tasks: what it cost, then its tasks, then their mean."""
        answers = [self._answers(cell, task) for task in self.tasks]
        costs = [each.costs for each in answers]
        greyed = any(_idle(cell, each) for each in answers)
        share = Budget.of(cell.budget).share
        seconds = [cost["seconds"] for cost in costs if "seconds" in cost]
        return {
            **{name: getattr(cell, name) for name in ("key", "policy", "budget", "label", "full")},
            "share": None if share is None else float(share),
            **{name: _average([cost[name] for cost in costs]) for name in SHARES},
            "bytes_per_document": sum(cost["bytes"] for cost in costs) / max(1, sum(cost["documents"] for cost in costs)),
            "greyed": greyed,
            "floor": bool(self._floors[cell.key]),
            "seconds": sum(seconds) if seconds else None,
            "tasks": {task.name: entries[task.name] for task in self.tasks},
            "mean": {**entries[MEAN], "greyed": greyed},
        }

    def _noise(self, again: Cell) -> Entry:
        """How often the full cache, batched otherwise, picks something else, and by how many nats an answer moves at most."""
        pairs = [(self._answers(self.full, task), self._answers(again, task)) for task in self.tasks]
        return {
            "flips": sum(int((first.picks != second.picks).sum()) for first, second in pairs),
            "n": sum(len(first.picks) for first, _ in pairs),
            "furthest": known(max(furthest(first, second) for first, second in pairs)),
        }


def _idle(cell: Cell, answers: Answers) -> bool:
    """Whether a cell that asks for less than everything acted on fewer than half of the prompts."""
    return not Budget.of(cell.budget).whole and (answers.costs["acted"] or 0.0) < HALF


def _average(shares: Sequence[float | None]) -> float | None:
    given = [share for share in shares if share is not None]
    return sum(given) / len(given) if given else None


def _published(reference: Mapping[str, Any] | None, cell: Cell, task: Task) -> float | None:
    """The published accuracy of a cell on a task; a row that names no model, or this one, speaks of it."""
    for row in reference["rows"] if reference else ():
        same = row["policy"] == cell.policy and Budget.of(row["budget"]) == Budget.of(cell.budget) and row["task"] == task.name
        if same and row.get("model") in (None, cell.model):
            return float(row["accuracy"]) / 100
    return None


# What is read off the cells


def size(budget: str) -> tuple[bool, Fraction | int]:
    """What budgets are sorted by: shares first, then numbers of tokens."""
    asked = Budget.of(budget)
    return (False, asked.share) if asked.share is not None else (True, asked.tokens or 0)


def _by_policy(cells: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The cells with less than everything, by policy, the smallest budget first."""
    found: dict[str, list[Entry]] = {}
    for cell in sorted(cells, key=lambda cell: size(cell["budget"])):
        if not cell["full"] and cell["share"] != 1:
            found.setdefault(cell["policy"], []).append(cell)
    return {policy: found[policy] for policy in dict.fromkeys(cell["policy"] for cell in cells) if policy in found}


def _knee(cells: Sequence[Entry], task: str) -> Entry:
    """The smallest budget below 100 % at which a policy (`cells`, by size) is ok on a task or on the mean."""
    rows = [(place, _ok(cell, task), bool(cell["floor"]), _acted(cell, task)) for place, cell in enumerate(cells)]
    found = stats.knee(rows)
    passed_over = [cells[place]["budget"] for place, _, floor, acted in rows if floor or acted < HALF]
    notes = ["none of those measured"] if found.budget is None else [] if found.monotone else ["a larger one is not"]
    notes += [f"not counted: {', '.join(passed_over)}"] if passed_over else []
    return {
        "policy": cells[0]["policy"],
        "task": task,
        "budget": None if found.budget is None else cells[int(found.budget)]["budget"],
        "monotone": found.monotone,
        "note": "; ".join(notes),
    }


def _ok(cell: Entry, task: str) -> bool:
    entry = cell["mean"] if task == MEAN else cell["tasks"][task]
    return bool(entry["verdict"] == "ok")


def _acted(cell: Entry, task: str) -> float:
    """The share of prompts on which a cell acted; for the mean, of the task where it did so least."""
    return min(entry["acted"] or 0.0 for name, entry in cell["tasks"].items() if task in (name, MEAN))


def _front(cells: Sequence[Entry], cost: str) -> list[str]:
    """Keys of the cells that no other beats in mean accuracy against a cost; none where the cost is unknown."""
    costs = [math.nan if cell[cost] is None else cell[cost] for cell in cells]
    kept = stats.pareto(costs, [cell["mean"]["accuracy"] for cell in cells])
    return [cell["key"] for cell, keep in zip(cells, kept, strict=True) if keep]
