"""lm-eval's own six tasks over rows held in memory: what every other way of supplying rows has to agree with."""

from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval.tasks
from datasets import Dataset, DatasetDict
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

TASKS = Path(lm_eval.tasks.__file__).parent
YAMLS = {
    "piqa": TASKS / "piqa/piqa.yaml",
    "hellaswag": TASKS / "hellaswag/hellaswag.yaml",
    "copa": TASKS / "super_glue/copa/default.yaml",
    "winogrande": TASKS / "winogrande/default.yaml",
    "openbookqa": TASKS / "openbookqa/openbookqa.yaml",
    "boolq": TASKS / "super_glue/boolq/default.yaml",
}
EVALUATED = dict.fromkeys(YAMLS, "validation") | {"openbookqa": "test"}

Rows = list[dict[str, Any]]


def official_task(name: str, rows: Rows) -> Task:
    """Build the official task, unchanged, while a stand-in for the hub serves `rows` as each of its splits."""

    def hub(path: str, name: str | None = None) -> DatasetDict:
        assert "/" in path, "the official tasks name a repository of the hub"
        return DatasetDict({split: Dataset.from_list(rows) for split in ("train", "validation", "test")})

    with mock.patch("datasets.load_dataset", hub):
        return loaded(name, YAMLS[name].parent)


def loaded(name: str, folder: Path) -> Task:
    """Let lm-eval build the task from the YAMLs of one folder alone; its own index of all tasks takes ten seconds."""
    return TaskManager(include_path=str(folder), include_defaults=False).load(name)["tasks"][name]


def requests(task: Task, shots: int = 0, limit: int | None = None) -> list[tuple[Any, ...]]:
    """Return what a model would be asked, in order: type, number of document and of choice, context, continuation."""
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=1234)
    task.build_all_requests(limit=limit)
    return [(each.request_type, each.doc_id, each.idx, *each.args) for each in task.instances]


def right_choices(task: Task, doc: dict[str, Any]) -> list[int]:
    """Return the numbers of the choices that score when a model prefers them."""
    count = task.multiple_input or len(task.doc_to_choice(doc))
    answers = [[(float(choice == other), False) for other in range(count)] for choice in range(count)]
    return [choice for choice, answer in enumerate(answers) if task.process_results(doc, answer)["acc"]]
