"""A scorer without a model, for the tests of sweeps: answers are digests of what is asked, and what it was asked is on record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from evalkit.harness import tasks
from evalkit.harness.worker import Answered, Asking, Encoded, Pack, Ready, Scored
from evalkit.plan import ModelChoice, Plan
from evalkit.shares import QUANTITIES
from evalkit.store import digest

SIX = ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq")
LEAST: dict[str, Any] = {
    "title": "A stub's run", "models": ["stub"], "policies": ["h2o", "random"], "budgets": [0.1, 0.5],
    "tasks": ["mini_copa", "mini_boolq"], "limit": 6, "shard": 4,
}  # fmt: skip
IDENTITY: dict[str, Any] = {
    "folder": "stub", "digest": "0" * 16, "dtype": "float32", "device": "cpu", "attn": "sdpa", "positions": 4096,
}  # fmt: skip


@contextmanager
def mini_alone() -> Iterator[None]:
    """Keep lm-eval from indexing its thousands of tasks while inside: a sweep knows the mini suite alone."""
    tasks._manager.cache_clear()
    with patch.object(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False)):
        yield
    tasks._manager.cache_clear()


def planned(**changes: Any) -> Plan:
    """A small plan on the mini suite."""
    return Plan.model_validate({**LEAST, **changes})


@dataclass
class Stub:
    """Scores packs of bytes; `log` gets a line for each model loaded and each pack scored, after a nap of so many seconds."""

    log: Path
    nap: float = 0.0
    identity: tuple[tuple[str, Any], ...] = ()  # what differs from IDENTITY

    def __post_init__(self) -> None:
        self.note("loaded")

    def note(self, what: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def described(self) -> dict[str, Any]:
        return {**IDENTITY, **dict(self.identity)}

    def encoded(self, items: Sequence[tasks.Item]) -> Encoded:
        pairs = [tuple((tuple(a.encode()), tuple(b.encode())) for a, b in item.requests) for item in items]
        return Encoded([Ready(item.doc_id, found) for item, found in zip(items, pairs, strict=True)], 0, 0, {None: 64})

    def score(self, pack: Pack) -> Scored:
        start = time.perf_counter()
        cells = [answered(cell, pack) for cell in pack.cells]
        time.sleep(self.nap)
        self.note([pack.task, pack.protocol, [ready.doc_id for ready in pack.documents]])
        return Scored(cells, {"total": time.perf_counter() - start}, sum(len(ready.longest) for ready in pack.documents))


def answered(cell: Asking, pack: Pack) -> Answered:
    """What a cell answers: the same whatever else is asked."""
    own = [cell.policy, cell.budget, dict(cell.knobs), pack.protocol]
    logprobs = [[-int(digest([own, pair]), 16) / 2**62 for pair in ready.requests] for ready in pack.documents]
    count, acts = len(pack.documents), cell.policy != "full"
    sums = dict.fromkeys(QUANTITIES, 100.0 * count) | ({"held": 10.0 * count, "bytes": 10.0 * count} if acts else {})
    costs = {
        "documents": count, "answers": sum(map(len, logprobs)), "prompt_tokens": 0, "answer_tokens": 0, "truncated": 0,
        "skipped": 0, "acted": acts * count, "sums": sums,
    }  # fmt: skip
    return Answered(logprobs, [[logprob > -1 for logprob in row] for row in logprobs], costs)


def loader(log: Path, nap: float = 0.0, **identity: Any) -> Any:
    """What a sweep takes as its loader."""
    return partial(_made, log, nap, tuple(identity.items()))


def _made(log: Path, nap: float, identity: tuple[tuple[str, Any], ...], choice: ModelChoice, plan: Plan) -> Any:
    return partial(Stub, log, nap, identity)


def noted(log: Path) -> list[Any]:
    """What was put on record."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
