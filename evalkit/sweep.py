"""Runs a plan: collects what its tasks ask, has every cell answer in one pass over the prompts, records pack by pack.

Knows neither attention nor statistics. A run is its folder: the same command takes it up where it was left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import data as local
from .errors import UsageError
from .manifest import agrees, manifest, packed, policies, shown
from .plan import ModelChoice, Plan, load
from .rooms import room
from .spread import Crew, Crews, alone, cluster, processes
from .store import Damaged, PackName, Store, digest, locked, refuse_other

if TYPE_CHECKING:
    from .harness.tasks import Asked, Item
    from .harness.worker import Asking, Encoded, Pack, Ready, Scored

Say = Callable[[str], None]
Loader = Callable[[ModelChoice, Plan], Callable[[], Any]]  # how a model's scorer is made


def worker(choice: ModelChoice, plan: Plan) -> Callable[[], Any]:
    """Return what makes the scorer of one of a plan's models."""
    from .harness.worker import Worker

    settings = {"overlength": plan.overlength, "attn": plan.attn, "prefill_chunk": plan.prefill_chunk, "offload": plan.offload}
    return partial(Worker, choice.name, choice.args, settings)


def prepared(plan: str, out: Path | None, data: Path | None, limit: int | None, jobs: int = 1, ray: str | None = None) -> Sweep:
    """Return the sweep that the command line asks for."""
    asked = load(plan)
    if limit is not None:
        asked = Plan.model_validate({**asked.model_dump(), "limit": limit})
    crews = cluster(ray, jobs if jobs > 1 else None) if ray else processes(jobs) if jobs > 1 else alone
    return Sweep(asked, out or Path("runs") / Path(plan).stem, data, crews)


@dataclass
class Sweep:
    """A plan on its way into a folder."""

    plan: Plan
    folder: Path
    data: Path | None = None
    crews: Crews = alone
    loader: Loader = worker
    say: Say = field(default=lambda line: print(line, file=sys.stderr))

    def run(self) -> Store:
        """Score what the folder lacks, then write lm-eval's files; return the finished run."""
        from .harness.export import export

        policies(self.plan)  # what they refuse is said before anything is loaded
        with ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            refuse_other(self.folder, {"plan": self.plan.identity()})  # before tasks and models are loaded
            self.say("evalkit: reading the tasks")
            asked = stack.enter_context(_asked(self.plan, self.data))
            items = asked.items()
            tasks = _tasks(asked, items)
            if not (store := self.finished(tasks, items)):
                self.say(f"evalkit: loading {', '.join(choice.name for choice in self.plan.models)}")
                crews = [(choice, stack.enter_context(self.crews(self.loader(choice, self.plan)))) for choice in self.plan.models]
                models = [(choice, crew.call("described"), _encoded(crew, items)) for choice, crew in crews]
                store = self.begun(manifest(self.plan, models, tasks), items)
                for (choice, crew), (_, _, encoded) in zip(crews, models, strict=True):
                    self.score(store, choice, crew, encoded, asked)
            export(store, asked)
        return store

    def finished(self, tasks: list[dict[str, Any]], items: Mapping[str, Sequence[Item]]) -> Store | None:
        """Return the folder's run where it is the one asked for, as far as can be told without a model, and has all its packs."""
        if not (self.folder / "run.json").exists():
            return None
        store = Store.open(self.folder)
        if not agrees(store.manifest, self.plan, tasks) or not all(self.recorded(store, name) for name in store.names()):
            return None
        return self.begun({**store.manifest, "shown": shown(self.plan)}, items)

    def begun(self, written: Mapping[str, Any], items: Mapping[str, Sequence[Item]]) -> Store:
        """Begin a run, or take up the folder's, with what its documents ask."""
        store = Store.create(self.folder, written)
        for task, documents in items.items():
            store.write_documents(task, [item.told for item in documents])
        return store

    def score(self, store: Store, choice: ModelChoice, crew: Crew, encoded: Mapping[str, Encoded], asked: Asked) -> None:
        """Score one model's packs that are not recorded yet."""
        names = [name for name in store.names() if name.model == choice.name and not self.recorded(store, name)]
        parts = {task: packed(found, self.plan.shard) for task, found in encoded.items()}
        prefixes = {task: found.prefix for task, found in encoded.items()}
        work = {name: pack(store, self.plan, name, parts[name.task][name.number], prefixes[name.task]) for name in names}
        rows = {task: asked.documents(task) for task in encoded}
        with _progress() as bar:
            total = sum(len(one.documents) for one in work.values())
            cells = sum(cell["model"] == choice.name for cell in store.manifest["cells"])
            bar_id = bar.add_task(f"{choice.name} x {cells} cells", total=total, rate="")
            tokens, start = 0, time.monotonic()
            for name, scored in crew.scored(list(work.items())):
                record(store, name, work[name], scored, asked, rows[name.task])
                tokens += scored.computed
                rate = f"{tokens / (time.monotonic() - start):.0f} tokens/s"
                bar.update(bar_id, advance=len(work[name].documents), rate=rate)

    def recorded(self, store: Store, name: PackName) -> bool:
        """Whether a pack is recorded and whole; one that is not whole is set aside."""
        if not store.has(name):
            return False
        try:
            store.read(name)
        except Damaged as error:
            self.say(f"evalkit: {error}")
            self.say(f"evalkit: it is now {store.set_aside(name)}, and its documents are scored anew")
            return False
        return True

    def estimate(self) -> list[str]:
        """Say what the plan asks for: cells, documents, tokens, and about how long it takes, by timing a few documents."""
        policies(self.plan)
        lines = []
        with ExitStack() as stack:
            asked = stack.enter_context(_asked(self.plan, self.data))
            items = asked.items()
            for choice in self.plan.models:
                crew = stack.enter_context(self.crews(self.loader(choice, self.plan)))
                encoded = _encoded(crew, items)
                model = (choice, crew.call("described"), encoded)
                written = manifest(self.plan, [model], _tasks(asked, items))
                lines += _estimated(written, choice, self.plan, crew, encoded)
        return lines


def _estimated(
    written: Mapping[str, Any], choice: ModelChoice, plan: Plan, crew: Crew, encoded: Mapping[str, Encoded]
) -> list[str]:
    """Say what one model's part of a plan takes, by timing each task's first pack, cut short."""
    from .harness.worker import Pack

    lines, seconds = [f"{choice.name}: {len(written['cells'])} cells"], 0.0
    for task, found in encoded.items():
        count = len(found.documents)
        tokens = sum(len(prompt) + len(answer) for ready in found.documents for prompt, answer in ready.requests)
        spent = 0.0
        for protocol in plan.protocols:
            middle = found.documents[count // 2 : count // 2 + 2]
            sample = Pack(task, middle, _cells(written["cells"], choice.name, protocol, plan), protocol, found.prefix)
            took = crew.call("score", sample).seconds["total"] if middle else 0.0
            spent += took * count / max(1, len(middle))
        seconds += spent
        lines.append(f"  {task}: {count} documents, {tokens} tokens of prompts and answers, about {_duration(spent)}")
    return [*lines, f"  in all about {_duration(seconds)} with one worker"]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@contextmanager
def _asked(plan: Plan, data: Path | None) -> Iterator[Asked]:
    """Give what a plan's tasks ask."""
    from .harness.tasks import Tasks

    with ExitStack() as stack:
        include = [str(room("tasks")), *([str(stack.enter_context(local.prepared(data)))] if data else [])]
        drawn = {"subset": plan.seeds.subset, "fewshot_seed": plan.seeds.fewshot}
        yield Tasks(plan.tasks, include, plan.limit, plan.fewshot, plan.prefix, **drawn).asked()


def _encoded(crew: Crew, items: Mapping[str, Sequence[Item]]) -> dict[str, Encoded]:
    return {task: crew.call("encoded", documents) for task, documents in items.items()}


def _tasks(asked: Asked, items: Mapping[str, Sequence[Item]]) -> list[dict[str, Any]]:
    """What a manifest says of the tasks."""
    told = []
    for name, documents in items.items():
        choices = [len(item.told["choices"]) for item in documents]
        first = documents[0]
        metrics = asked.metrics(name, asked.documents(name)[first.doc_id], [(-1.0, False)] * len(first.requests))
        if "acc" not in metrics:
            raise UsageError(f"task {name} has no accuracy (it has {', '.join(metrics) or 'no numbers'}): run it by `lm_eval`")
        told.append({
            "name": name,
            "digest": digest([[item.told[what] for what in ("doc_id", "doc_hash", "prompt_hash", "gold")] for item in documents]),
            "version": str(asked.tasks.leaves[name].VERSION),
            "documents": len(documents),
            "total": asked.tasks.total(name),
            "chance": sum(1 / count for count in choices if count) / len(choices),
            "metrics": list(metrics),
        })  # fmt: skip
    return told


def pack(store: Store, plan: Plan, name: PackName, documents: Sequence[Ready], prefix: int = 0) -> Pack:
    """Return what a pack of these documents asks."""
    from .harness.worker import Pack

    return Pack(name.task, documents, _cells(store.manifest["cells"], name.model, name.protocol, plan), name.protocol, prefix)


def _cells(cells: Sequence[Mapping[str, Any]], model: str, protocol: str, plan: Plan) -> list[Asking]:
    """The cells of a model under a protocol, as its scorer is asked for them."""
    from .harness.worker import Asking

    own = [cell for cell in cells if (cell["model"], cell["protocol"]) == (model, protocol)]
    return [
        Asking(cell["policy"].partition("(")[0], cell["budget"], cell["knobs"], plan.row_tokens)
        if "row_tokens" not in cell["knobs"]
        else Asking(cell["policy"], cell["budget"], {}, cell["knobs"]["row_tokens"])
        for cell in own
    ]


def record(store: Store, name: PackName, asked_pack: Pack, scored: Scored, asked: Asked, rows: Mapping[int, Any]) -> None:
    """Record a scored pack, with what lm-eval makes of each document's answers."""
    cells = [cell for cell in store.manifest["cells"] if (cell["model"], cell["protocol"]) == (name.model, name.protocol)]
    lines = []
    for cell, answered in zip(cells, scored.cells, strict=True):
        metrics: dict[str, list[float]] = {}
        for ready, logprobs, greedy in zip(asked_pack.documents, answered.logprobs, answered.greedy, strict=True):
            answers = list(zip(logprobs, greedy, strict=True))
            for metric, value in asked.metrics(name.task, rows[ready.doc_id], answers).items():
                metrics.setdefault(metric, []).append(value)
        lines.append({
            "cell": cell["key"], "logprobs": answered.logprobs, "greedy": answered.greedy, "metrics": metrics, "costs": answered.costs
        })  # fmt: skip
    store.write(name, {"seconds": scored.seconds, "computed_tokens": scored.computed}, lines)


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("documents"), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip
