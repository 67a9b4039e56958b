"""Scores lm-eval's tasks under many cells in one pass over the prompts; lm-eval then computes their metrics. Knows no policy."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import cache, partial
from io import StringIO
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import simple_parse_args_string

from ..counters import Counters
from ..errors import UsageError, nearest
from ..ledger import Record, refuse_idle
from ..policy import Policy
from ..requests import by_task, gathered
from .model import PolicyLM, progress

Answer = tuple[float, bool]
FEWSHOT_SEED = 1234  # lm-eval's own default


class Recorded(LM):
    """Answers requests from a list, in order; without one it keeps the requests."""

    def __init__(self, answers: Sequence[Answer] | None = None, asked: Sequence[Instance] | None = None) -> None:
        super().__init__()
        self.answers, self.requests, self.asked = answers, list[Instance](), asked

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        self.requests = requests
        if self.asked is not None and [request.args for request in requests] != [request.args for request in self.asked]:
            raise RuntimeError("lm-eval put other requests than those that were scored")
        return [(0.0, False)] * len(requests) if self.answers is None else list(self.answers)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise UsageError(f"task {requests[0].task_name} scores whole texts: run it by `lm_eval`; tables hold multiple-choice tasks")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        raise UsageError(f"task {requests[0].task_name} generates text: run it by `lm_eval`; tables hold multiple-choice tasks")


@dataclass
class CellResult:
    """One cell's lm-eval results and what each task cost under it."""

    results: dict[str, Any]
    records: dict[str, Record] = field(default_factory=dict)


@cache
def _manager(include: tuple[str, ...]) -> TaskManager:
    """Return lm-eval's index of tasks, which takes seconds to make."""
    return TaskManager(include_path=list(include))


@dataclass
class Tasks:
    """Tasks of lm-eval, loaded once."""

    names: list[str]
    include: Sequence[str]
    limit: int | None = None
    fewshot: int | None = None

    def __post_init__(self) -> None:
        self.manager = _manager(tuple(self.include))
        for name in self.names:
            if name not in self.manager.all_tasks:
                raise UsageError(f"task {name} is not known{nearest(name, self.manager.all_tasks)}: see `lm_eval ls tasks`")
        with quiet("lm_eval"):
            self.loaded = self.manager.load(self.names)
        for task in self.loaded[
            "tasks"
        ].values():  # what simple_evaluate would set, less the seconds it spends on describing the machine
            fixed = task.get_config("num_fewshot") == 0
            if not fixed and (self.fewshot is not None or task.get_config("num_fewshot") is None):
                task.set_config(key="num_fewshot", value=self.fewshot or 0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)

    def evaluate(self, model: LM) -> dict[str, Any]:
        """Let lm-eval put the tasks' requests to `model` and compute their metrics."""
        with quiet("lm_eval"):
            found: dict[str, Any] = evaluate(model, self.loaded, limit=self.limit, bootstrap_iters=0)
            return found


def across(lm: PolicyLM, cells: Mapping[str, Policy], tasks: Tasks, protocol: str = "prompt") -> dict[str, CellResult]:
    """Score the tasks' requests under every cell, each prompt taken in once; return each cell's results as lm-eval makes them."""
    collector = Recorded()
    tasks.evaluate(collector)
    answers = {name: [(float("-inf"), False)] * len(collector.requests) for name in cells}
    results = {name: CellResult({}) for name in cells}
    grouped = by_task([lm.encoded(number, request) for number, request in enumerate(collector.requests)])
    with progress(False) as bar:
        for task, requests in grouped.items():
            left = Record()
            documents, where = gathered(lm.admit(requests, left))
            bar_id = bar.add_task(f"{task} x {len(cells)} cells", total=len(documents))
            lm.engine.counters = Counters()
            scored = lm.engine.score(documents, list(cells.values()), protocol, partial(bar.advance, bar_id))
            for (name, policy), cell in zip(cells.items(), scored, strict=True):
                refuse_idle(policy, documents, cell.tally)
                record = Record(truncated=left.truncated, skipped=left.skipped, cells=len(cells))
                results[name].records[task] = record
                record.add(documents, cell.tally)
                record.spent(lm.engine.counters)
                for number, (document, place) in where.items():
                    score = cell.scores[document][place]
                    answers[name][number] = (score.logprob, score.greedy)
    for name, result in results.items():
        result.results = tasks.evaluate(Recorded(answers[name], collector.requests))
    return results


def arguments(text: str) -> dict[str, Any]:
    """Read `name=value,...` as lm-eval does."""
    parsed: dict[str, Any] = simple_parse_args_string(text)
    return parsed


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Hold back a library's warnings and progress bars while inside; errors still come through as exceptions."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logger.setLevel(level)
