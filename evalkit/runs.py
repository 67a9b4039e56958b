"""A run as it is read again: its cells, its tasks, and what every document was answered under each; needs no torch and no lm-eval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError
from .shares import QUANTITIES, shares
from .store import PackName, Store


@dataclass(frozen=True)
class Cell:
    """A policy at a budget, on a model, under a protocol."""

    key: str  # a digest of all that can change one of its numbers
    model: str
    protocol: str
    policy: str  # h2o, h2o:paper, h2o(every_step=True)
    budget: str  # 10%, 256, 100%
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.policy}@{self.budget}"

    @property
    def full(self) -> bool:
        """Whether it is the full cache, with which the others are compared."""
        return self.policy == "full"


@dataclass(frozen=True)
class Task:
    """A task as it was asked."""

    name: str
    digest: str  # of everything asked and expected
    documents: int  # asked
    total: int  # that the task has
    chance: float  # accuracy of guessing
    metrics: tuple[str, ...]  # acc, acc_norm ...

    @property
    def subset(self) -> bool:
        """Whether only a seeded random part was asked."""
        return self.documents < self.total


@dataclass(frozen=True)
class Answers:
    """What one cell answered to one task's documents, in the order of `doc_ids`."""

    doc_ids: NDArray[np.int64]  # [n]
    logprobs: list[NDArray[np.float64]]  # of each document's choices
    metrics: Mapping[str, NDArray[np.float64]]  # name -> [n]
    costs: Mapping[str, Any]  # documents, tokens, shares held and read, acted

    @cached_property
    def picks(self) -> NDArray[np.int64]:
        """[n] the likeliest choice of each document; the first of equals."""
        return np.array([int(np.argmax(choices)) for choices in self.logprobs], dtype=np.int64)


@dataclass(frozen=True)
class Run:
    """A run's folder, read whole; `missing` names the packs that were not there yet."""

    store: Store
    cells: list[Cell]
    tasks: list[Task]
    answers: Mapping[tuple[str, str], Answers]  # (cell's key, task's name); only tasks whose packs are all there
    missing: list[PackName]
    seconds: float  # of all packs
    tokens: int  # computed for all packs

    @classmethod
    def load(cls, folder: Path) -> Run:
        """Read a run. Raises UsageError for a folder without one, and for packs that are damaged or of another run."""
        store = Store.open(folder)
        if kind := store.manifest.get("kind"):
            raise UsageError(f"{folder} holds a {kind} run, not a sweep: give the folder of one that `evalkit sweep --out` wrote")
        names = store.names()
        missing = [name for name in names if not store.has(name)]
        gaps = {(name.model, name.protocol, name.task) for name in missing}
        parts: dict[tuple[str, str], list[tuple[list[int], dict[str, Any]]]] = {}
        seconds, tokens = 0.0, 0
        for name in names:
            if not store.has(name):
                continue
            head, lines = store.read(name)
            seconds, tokens = seconds + head["seconds"].get("total", 0.0), tokens + head["computed_tokens"]
            for line in lines if (name.model, name.protocol, name.task) not in gaps else ():
                parts.setdefault((line["cell"], name.task), []).append((head["documents"], line))
        answers = {at: _joined(packs) for at, packs in parts.items()}
        cells = [Cell(**_known(Cell, cell)) for cell in store.manifest["cells"]]
        tasks = [Task(**_known(Task, {**task, "metrics": tuple(task["metrics"])})) for task in store.manifest["tasks"]]
        return cls(store, cells, tasks, answers, missing, seconds, tokens)

    def documents(self, task: str) -> list[dict[str, Any]]:
        """Return what a task's documents ask: doc_id, doc_hash, prompt_hash, cluster, contexts, choices, gold (or None)."""
        return self.store.documents(task)


def _known(kind: type[Cell] | type[Task], told: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest tells that is asked for here."""
    return {each.name: told[each.name] for each in fields(kind)}


def _joined(packs: list[tuple[list[int], dict[str, Any]]]) -> Answers:
    """Put a cell's packs of one task together, in the order of the doc_ids."""
    doc_ids = np.array([doc_id for documents, _ in packs for doc_id in documents], dtype=np.int64)
    order = np.argsort(doc_ids)
    logprobs = [np.array(choices) for _, line in packs for choices in line["logprobs"]]
    metrics = {
        name: np.array([value for _, line in packs for value in line["metrics"][name]])[order] for name in packs[0][1]["metrics"]
    }
    return Answers(doc_ids[order], [logprobs[i] for i in order], metrics, _costs([line["costs"] for _, line in packs]))


def _costs(costs: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up what the packs cost a cell, and make shares of it."""
    counted = {name: sum(cost[name] for cost in costs) for name in costs[0] if name != "sums"}
    sums = {name: sum(cost["sums"][name] for cost in costs) for name in QUANTITIES}
    acted = counted["acted"] / counted["documents"] if counted["documents"] else None
    return {**counted, **shares(sums), "acted": acted, "dense_bytes": int(sums["dense_bytes"])}
