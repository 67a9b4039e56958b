"""Puts vLLM, the full cache and lm-eval's hf side by side on the same documents: results, and seconds in turn; knows no policy.

    python -m evalkit.harness.versus --data DIR --out FOLDER

needs vLLM. Every side runs at its best size of batch or row, which vLLM chooses by itself.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import NamedTuple

from lm_eval.api.instance import Instance

from .. import data as local
from ..bench import HF_BATCHES, ROW_TOKENS
from ..fetch import DEFAULT, model_folder
from ..formats import Section, Word, markdown
from ..perf.machine import machine
from ..perf.sections import machine as said
from ..rooms import room
from ..store import write
from . import kv_full
from .model import plain_hf
from .tasks import Answer, Recorded, Tasks
from .vllm import VllmLM

Ask = Callable[[list[Instance]], list[Answer]]
BASE = "kv_full"
THREADS = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
SOME = 40  # requests that the best size is looked for on
HEAD = ("task", "side", "accuracy", "other answers", "furthest log-likelihood", "other greedy flags", "seconds", "to kv_full")
KEY = (
    "Accuracy in percent. Log-likelihoods are compared request by request with kv_full's; an answer is a document's likeliest choice.",
    "Seconds are the median of the rounds, in each of which every side had its turn, with their range; loading is not in them.",
    "The last column is the median of the rounds' ratios.",
)


class Row(NamedTuple):
    """One side's results on a task beside kv_full's, and its seconds in each round."""

    task: str
    side: str
    accuracy: float
    answers: int
    furthest: float
    flags: int
    seconds: tuple[float, ...]
    ratio: float

    def words(self) -> list[Word]:
        """Return the row as a table shows it."""
        took = f"{median(self.seconds):.2f} [{min(self.seconds):.2f} .. {max(self.seconds):.2f}]"
        told = (f"{100 * self.accuracy:.1f}", str(self.answers), f"{self.furthest:.1e}", str(self.flags), took, f"{self.ratio:.2f}")
        return [Word(text) for text in (self.task, self.side, *told)]


def compared(task: Tasks, sides: Mapping[str, Ask], repeats: int) -> list[Row]:
    """Put one task's requests to every side in turn, `repeats` times after one that is not timed; return a row for each side."""
    (name,), collector = task.names, Recorded()
    task.evaluate(collector)
    requests = collector.requests
    found = {side: ask(requests) for side, ask in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, ask in sides.items():
            seconds[side].append(timeit(partial(ask, requests), number=1))
    base = picked(requests, found[BASE])
    return [
        Row(
            name,
            side,
            task.evaluate(Recorded(answers))["results"][name]["acc,none"],
            sum(a != b for a, b in zip(picked(requests, answers), base, strict=True)),
            max(abs(a - b) for (a, _), (b, _) in zip(answers, found[BASE], strict=True)),
            sum(a != b for (_, a), (_, b) in zip(answers, found[BASE], strict=True)),
            tuple(seconds[side]),
            median(a / b for a, b in zip(seconds[side], seconds[BASE], strict=True)),
        )
        for side, answers in found.items()
    ]


def picked(requests: Sequence[Instance], answers: Sequence[Answer]) -> list[int]:
    """Return the number of the likeliest choice of each document."""
    documents: dict[int, dict[int, float]] = {}
    for request, (logprob, _) in zip(requests, answers, strict=True):
        documents.setdefault(request.doc_id, {})[request.idx] = logprob
    return [max(choices, key=choices.__getitem__) for choices in documents.values()]


def sides(folder: str, some: list[Instance]) -> dict[str, Ask]:
    """Load every side, at the size that `some` requests are answered fastest with."""
    given = {"dtype": "float32", "device": "cpu"}
    hf, kv, vllm = plain_hf(folder, **given), kv_full(folder, **given), VllmLM(folder, dtype="float32")

    def batched(size: int) -> list[Answer]:
        hf.batch_size_per_gpu = size
        return hf.loglikelihood(some, disable_tqdm=True)

    def packed(tokens: int) -> list[Answer]:
        kv.engine.row_tokens = tokens
        return kv.loglikelihood(some, disable_tqdm=True)

    best = min(HF_BATCHES, key=lambda size: timeit(partial(batched, size), number=1))
    hf.batch_size_per_gpu = best
    kv.engine.row_tokens = min(ROW_TOKENS, key=lambda tokens: timeit(partial(packed, tokens), number=1))
    named = {BASE: kv, "kv_vllm": vllm, f"hf, batch_size {best}": hf}
    return {side: partial(lm.loglikelihood, disable_tqdm=True) for side, lm in named.items()}


def page(rows: Sequence[Row], command: str, limit: int) -> str:
    """Return the table and where it comes from, in Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("kv-evalkit", "lm_eval", "torch", "transformers"))
    import vllm

    about = (
        f"{DEFAULT}, float32, the first {limit} documents of each task. {packages}, vllm {vllm.__version__}.",
        said(machine("cpu")),
        f"Made by `{command}`.",
    )
    return markdown([Section("vLLM beside the full cache", 1, HEAD, [row.words() for row in rows], (*KEY, *about))])


def typed(data: Path | None) -> str:
    """Return the command as it can be typed elsewhere: with the threads that were set, and without this machine's folder of data."""
    threads = [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]
    words = ["DIR" if word == str(data) else word for word in sys.argv[1:]]
    return shlex.join([*threads, "python", "-m", "evalkit.harness.versus", *words])


def main() -> None:
    """Run the comparison; write FOLDER/report.md."""
    parser = ArgumentParser(prog="python -m evalkit.harness.versus", description="vLLM beside the full cache and lm-eval's hf.")
    parser.add_argument("--data", type=Path, help="a folder with DATA/<task>/<split>.jsonl files; else the hub is asked")
    parser.add_argument("--tasks", default="copa,openbookqa,winogrande")
    parser.add_argument("--limit", type=int, default=50, help="documents of each task")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with ExitStack() as stack:
        include = [str(room("tasks")), *([str(stack.enter_context(local.prepared(given.data)))] if given.data else [])]
        tasks = [Tasks([name], include, given.limit) for name in given.tasks.split(",")]
        every = sides(str(model_folder(DEFAULT)), list(tasks[0].asked().instances)[:SOME])
        rows = [row for task in tasks for row in compared(task, every, given.repeats)]
    text = page(rows, typed(given.data), given.limit)
    write(given.out / "report.md", text)
    print(text)


if __name__ == "__main__":
    main()
