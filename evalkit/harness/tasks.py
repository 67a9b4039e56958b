"""lm-eval's tasks: what they ask, document by document, and what they make of the answers; knows no model and no policy."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.samplers import FirstNSampler
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, hash_string

from ..errors import UsageError, nearest

Answer = tuple[float, bool]
FEWSHOT_SEED = 1234  # lm-eval's own default
TOGETHER = ("passage", "source_id", "qID")  # columns whose equals make documents depend on each other
BOOTSTRAP = 100000  # samples of the standard errors that have no formula, as lm-eval draws by itself
UNANSWERED: Answer = (float("-inf"), False)


@dataclass(frozen=True)
class Item:
    """One document of a task: its requests, context and continuation each, and what is told of it in a run's folder."""

    task: str
    doc_id: int
    requests: tuple[tuple[str, str], ...]
    told: Mapping[str, Any]


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
        raise UsageError(f"task {requests[0].task_name} scores whole texts: run it by `lm_eval`; sweeps hold multiple-choice tasks")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        raise UsageError(f"task {requests[0].task_name} generates text: run it by `lm_eval`; sweeps hold multiple-choice tasks")


@cache
def _manager(include: tuple[str, ...]) -> TaskManager:
    """Return lm-eval's index of tasks, which takes seconds to make. Its warnings are of tasks that local data stand in for."""
    with quiet("lm_eval.tasks"):
        return TaskManager(include_path=list(include))


@dataclass
class Tasks:
    """Tasks of lm-eval, loaded once. `limit` takes the first documents, or, with a `subset` seed, a random part of them."""

    names: Sequence[str]
    include: Sequence[str]
    limit: int | None = None
    fewshot: int | None = None
    prefix: bool = False
    subset: int | None = None
    fewshot_seed: int = FEWSHOT_SEED
    samples: dict[str, list[int]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        manager = _manager(tuple(self.include))
        for name in self.names:
            if name not in manager.all_tasks:
                raise UsageError(f"task {name} is not known{nearest(name, manager.all_tasks)}: see `lm_eval ls tasks`")
        self.loaded = self._loaded(manager)
        for name, task in self.leaves.items():
            self._set_examples(name, task)
        if self.limit is not None and self.subset is not None:
            self.samples = {name: drawn(self.subset, name, self.total(name), self.limit) for name in self.leaves}

    def _loaded(self, manager: TaskManager) -> dict[str, Any]:
        try:
            with quiet("lm_eval"):
                return manager.load(list(self.names))
        except UsageError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"the rows of {', '.join(self.names)} cannot be loaded ({type(error).__name__}: {reason}): give --data DIR with "
                "DIR/<task>/<split>.jsonl, or go online"
            ) from error

    @property
    def leaves(self) -> dict[str, Any]:
        """The tasks that ask something, by name; groups are made of them."""
        return self.loaded["tasks"]

    def total(self, name: str) -> int:
        """How many documents the task has."""
        return len(self.leaves[name].eval_docs)

    def _set_examples(self, name: str, task: Any) -> None:
        """Set the few-shot examples as lm-eval's simple_evaluate would."""
        if task.get_config("num_fewshot") != 0 and (self.fewshot is not None or task.get_config("num_fewshot") is None):
            task.set_config(key="num_fewshot", value=self.fewshot or 0)
        count = task.get_config("num_fewshot")
        if count and not hasattr(task, "sampler"):
            raise UsageError(f"task {name} has no split that examples could come from: give fewshot 0, or rows for such a split")
        if count and count > len(task.sampler.df):
            raise UsageError(
                f"task {name} has {len(task.sampler.df)} examples to draw from, fewer than fewshot {count}: give fewer"
            )
        if count and self.prefix:
            task.sampler = FirstNSampler(task.sampler.df)

    def evaluate(self, model: LM, bootstrap: int = 0) -> dict[str, Any]:
        """Let lm-eval put the tasks' requests to `model` and compute their metrics, with standard errors if it may `bootstrap`."""
        for task in self.leaves.values():
            task.set_fewshot_seed(seed=self.fewshot_seed)  # the examples must be those of the last time
        chosen: dict[str, Any] = {"limit": self.limit} if self.samples is None else {"samples": self.samples}
        with quiet("lm_eval"):
            found: dict[str, Any] = evaluate(model, self.loaded, bootstrap_iters=bootstrap, **chosen)
            return found

    def asked(self) -> Asked:
        """Return what the tasks ask."""
        collector = Recorded()
        self.evaluate(collector)
        return Asked(self, collector.requests)


@dataclass(frozen=True)
class Asked:
    """The requests that lm-eval puts for tasks, in its order."""

    tasks: Tasks
    instances: Sequence[Instance]

    def items(self) -> dict[str, list[Item]]:
        """Return the documents asked, task by task."""
        items: dict[str, list[Item]] = {name: [] for name in self.tasks.leaves}
        for (task, place), requests in self.grouped().items():
            items[task].append(self._item(task, place, requests))
        return items

    def grouped(self) -> dict[tuple[str, int], list[Instance]]:
        """Return each document's requests, in their order, by the task and the document's place among those asked."""
        groups: dict[tuple[str, int], list[Instance]] = {}
        for instance in self.instances:
            groups.setdefault((instance.task_name, instance.doc_id), []).append(instance)
        return {key: sorted(requests, key=lambda instance: instance.idx) for key, requests in groups.items()}

    def doc_id(self, task: str, place: int) -> int:
        return place if self.tasks.samples is None else self.tasks.samples[task][place]

    def _item(self, name: str, place: int, requests: list[Instance]) -> Item:
        task, doc = self.tasks.leaves[name], requests[0].doc
        args = tuple((str(request.args[0]), str(request.args[1])) for request in requests)
        choices = len(getattr(task, "doc_to_choice", lambda _: [])(doc) or [])
        row = json.dumps(doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
        told = {
            "doc_id": self.doc_id(name, place),
            "doc_hash": hash_string(row)[:16],
            "prompt_hash": hash_string(json.dumps(args))[:16],
            "cluster": next((hash_string(str(doc[column]))[:16] for column in TOGETHER if doc.get(column)), None),
            "contexts": [context for context, _ in args[: choices or None]],
            "choices": [continuation for _, continuation in args[: choices or None]],
            "gold": self._gold(name, doc, len(args)) if choices else None,
        }
        return Item(name, told["doc_id"], args, told)

    def _gold(self, name: str, doc: Any, count: int) -> int | None:
        """The number of the right choice: the one that lm-eval calls accurate if it is the likeliest."""
        for right in range(count):
            if self.metrics(name, doc, [(-float(choice != right), False) for choice in range(count)]).get("acc") == 1:
                return right
        return None

    def metrics(self, task: str, doc: Any, answers: Sequence[Answer]) -> dict[str, float]:
        """Return what lm-eval makes of one document's answers, numbers only."""
        with quiet("lm_eval"):
            found = self.tasks.leaves[task].process_results(doc, list(answers))
        return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}

    def documents(self, task: str) -> dict[int, Any]:
        """Return the rows of a task's documents by doc_id."""
        return {self.doc_id(name, place): requests[0].doc for (name, place), requests in self.grouped().items() if name == task}

    def answered(self, answers: Mapping[tuple[str, int], Sequence[Answer]]) -> dict[str, Any]:
        """Let lm-eval compute its results from the answers to each (task, doc_id); what has none counts as unanswered."""
        given: dict[tuple[str, int, int], Answer] = {}
        for (task, place), requests in self.grouped().items():
            own = answers.get((task, self.doc_id(task, place)), [UNANSWERED] * len(requests))
            given.update({(task, place, request.idx): answer for request, answer in zip(requests, own, strict=True)})
        line = [given[i.task_name, i.doc_id, i.idx] for i in self.instances]
        return self.tasks.evaluate(Recorded(line, self.instances), BOOTSTRAP)


def drawn(seed: int, task: str, total: int, limit: int) -> list[int]:
    """Draw `limit` of a task's documents, the same ones whatever else is asked; all of them where there are no more."""
    return sorted(random.Random(f"{seed} {task}").sample(range(total), min(limit, total)))


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
