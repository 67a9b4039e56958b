"""Accuracy against budget as a table: which cells are asked for, and how their results are shown; knows no model."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from . import data as local
from .errors import UsageError
from .policies import build, resolve
from .policy import Policy
from .rooms import room

if TYPE_CHECKING:
    from .harness.cells import CellResult

SIX = ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq")


@dataclass(frozen=True)
class Asked:
    """A table to make: every policy at every budget (full once) on every task."""

    tasks: Sequence[str]
    policies: Sequence[str]
    budgets: Sequence[str]
    protocol: str = "prompt"
    limit: int | None = None
    fewshot: int | None = None
    model_args: str = ""
    data: Path | None = None

    def cells(self) -> dict[str, Policy]:
        """Return the cells by name, `policy@budget`; a policy that keeps everything stands once."""
        cells: dict[str, Policy] = {}
        for name in self.policies:
            budgets = ("100%",) if resolve(name)[0]().passive else self.budgets
            for budget in budgets:
                policy = build(name, budget)
                policy.check(self.protocol)
                cells[f"{name}@{policy.budget}"] = policy
        if not cells:
            raise UsageError("no cells are asked for: give --policy and --budget")
        return cells


@dataclass(frozen=True)
class Row:
    """One cell on one task."""

    cell: str
    task: str
    n: int
    acc: float
    stderr: float
    acc_norm: float | None
    evalkit: dict[str, Any]


def make(asked: Asked) -> tuple[list[Row], dict[str, Any]]:
    """Run the table's cells in one pass; return its rows, and where they come from."""
    cells = asked.cells()
    from .harness.cells import Tasks, across, arguments
    from .harness.model import PolicyLM

    with ExitStack() as stack:
        include = [room("tasks"), *([stack.enter_context(local.prepared(asked.data))] if asked.data else [])]
        tasks = Tasks(list(asked.tasks), [str(folder) for folder in include], asked.limit, asked.fewshot)
        given = arguments(asked.model_args)
        if taken := sorted({"policy", "preset", "budget", "protocol"} & given.keys()):
            raise UsageError(f"--model-args {taken[0]}=... has no place here: give --policy, --budget and --protocol")
        lm = PolicyLM(policy="full", **given)
        start = time.time()
        results = across(lm, cells, tasks, asked.protocol)
    return [row for name, result in results.items() for row in rows(name, result)], _provenance(asked, lm, time.time() - start)


def rows(name: str, result: CellResult) -> list[Row]:
    """Read one cell's lm-eval results, task by task."""
    found = []
    for task, record in result.records.items():
        scores = result.results["results"][task]
        n = result.results["n-samples"][task]["effective"]
        error = scores.get("acc_stderr,none")
        acc = scores["acc,none"]
        stderr = error if isinstance(error, float) else math.sqrt(acc * (1 - acc) / max(1, n - 1))
        found.append(Row(name, task, n, acc, stderr, scores.get("acc_norm,none"), record.as_dict()))
    return found


def markdown(found: Sequence[Row]) -> str:
    """Return the table: a line for each cell, a column for each task, accuracy and standard error in percent."""
    tasks, cells = list(dict.fromkeys(row.task for row in found)), list(dict.fromkeys(row.cell for row in found))
    at = {(row.cell, row.task): row for row in found}
    lines = [
        "| policy@budget | "
        + " | ".join(f"{task} (n={at[cells[0], task].n})" for task in tasks)
        + " | mean | held | read | acted |"
    ]
    lines.append("|---|" + "---:|" * (len(tasks) + 4))
    for cell in cells:
        mine = [at[cell, task] for task in tasks]
        mean = sum(row.acc for row in mine) / len(mine)
        error = math.sqrt(sum(row.stderr**2 for row in mine)) / len(mine)
        shares = " | ".join(_percent([row.evalkit[what] for row in mine]) for what in ("held", "read", "acted"))
        accuracies = " | ".join(f"{100 * row.acc:.1f} ±{100 * row.stderr:.1f}" for row in mine)
        lines.append(f"| {cell}{' †' if _idle(mine) else ''} | {accuracies} | {100 * mean:.1f} ±{100 * error:.1f} | {shares} |")
    return "\n".join(lines)


def save(out: Path, found: Sequence[Row], provenance: Mapping[str, Any]) -> None:
    """Write `table.md` and `table.json` into the folder `out`, with where they come from."""
    out.mkdir(parents=True, exist_ok=True)
    body = json.dumps({"provenance": provenance, "rows": [asdict(row) for row in found]}, indent=1)
    (out / "table.json").write_text(body + "\n", encoding="utf-8")
    told = "\n".join(f"- {name}: {value}" for name, value in provenance.items())
    (out / "table.md").write_text(f"{markdown(found)}\n\n{LEGEND}\n\n{told}\n", encoding="utf-8")


LEGEND = (
    "Accuracy and its standard error in percent. Held and read: share of cache entries, of those the full cache would hold and read, "
    "whole model, mean over the tasks. Acted: share of prompts on which the policy did anything; † marks cells where it did nothing on "
    "most prompts of some task, so that this task's accuracy says little of the policy."
)


def _idle(rows: Sequence[Row]) -> bool:
    """Whether a policy with less than everything did nothing on most prompts of some task."""
    return not rows[0].cell.endswith("@100%") and any((row.evalkit["acted"] or 0.0) < 0.5 for row in rows)


def _percent(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{100 * sum(known) / len(known):.0f} %" if known else "-"


def _provenance(asked: Asked, lm: Any, seconds: float) -> dict[str, Any]:
    ledger = lm.ledger()
    packages = ("torch", "transformers", "lm_eval")
    return {
        "command": " ".join(["evalkit", *sys.argv[1:]]),
        "model": Path(str(lm.pretrained)).name,
        "model_digest": ledger["model_digest"],
        "dtype": str(lm.model.dtype),
        "device": str(lm.engine.device),
        "attn": ledger["attn"],
        "protocol": asked.protocol,
        "limit": "all" if asked.limit is None else f"the first {asked.limit} documents of each task",
        "few-shot": asked.fewshot or 0,
        "seconds": round(seconds),
        "machine": f"{platform.machine()}, {_threads()} threads",
        "versions": ", ".join([f"kv-evalkit {__version__}", *(f"{name} {version(name)}" for name in packages)]),
    }


def _threads() -> int:
    import torch

    return torch.get_num_threads()
