"""The process that measures: loads the model, keeps to a memory cap, tells what each cell took; knows neither folders nor tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import torch

from ..errors import UsageError
from ..fetch import DEFAULT
from ..model import digest, tiny
from ..rooms import room
from ..session import Engine
from ..spread import end_with_parent
from ..store import digest as hashed
from .asked import TINY, Asked, Cell
from .mass import Look, mass
from .measure import Meter

TINY_POSITIONS = 1 << 17
Message = tuple[Any, ...]


@dataclass(frozen=True)
class Round:
    """Some cells, to be measured one after the other at one place of what is asked."""

    asked: Asked
    at: int
    cells: Sequence[Cell]
    look: bool = False  # whether to see how much of full's attention each one keeps


def work(pipe: Connection, job: Round | Asked) -> None:
    """Measure a round, or say what the model is; send messages as they come: a word and what belongs to it."""
    Thread(target=end_with_parent, daemon=True).start()
    try:
        for message in described(job) if isinstance(job, Asked) else measured(job):
            pipe.send(message)
    except UsageError as error:
        pipe.send(("refused", str(error)))


def described(asked: Asked) -> Iterator[Message]:
    """Say what identifies the model; raise UsageError where it has too few positions."""
    _, about = loaded(asked)
    about["text"] = hashed(prompts_text(asked))
    if asked.positions > about["positions"]:
        raise UsageError(
            f"{asked.positions} tokens are more than the model's {about['positions']} positions: give fewer, in prompts or to say"
        )
    yield "described", about


def measured(job: Round) -> Iterator[Message]:
    """Measure each cell in turn: say that it begins, then what it took, or that memory ran out."""
    asked, (meter, _) = job.asked, loaded(job.asked)
    for cell in job.cells:
        meter.warm_up(cell)
    cap(asked.memory_cap, meter.engine.device)
    seen: dict[str, list[Look]] = {}
    for cell in job.cells:
        yield "begins", cell.label
        try:
            point, seen[cell.label] = meter.measure(
                cell, asked.prompts(job.at), asked.output(job.at), look=job.look and cell.counted and not cell.naive
            )
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            yield "out of memory", cell.label
        else:
            yield "took", cell.label, point
    yield "kept", kept(seen)


def kept(seen: dict[str, list[Look]]) -> dict[str, float]:
    """Return the share of full's attention that falls on what each cell reads, by its label; nothing where full was not seen."""
    whole = [looks for looks in seen.values() if looks and all(look.weights is not None for look in looks)]
    return {label: mass(whole[0], looks) for label, looks in seen.items() if looks} if whole else {}


def loaded(asked: Asked) -> tuple[Meter, dict[str, Any]]:
    """Load the model; return it ready to be measured, and what identifies it."""
    text = prompts_text(asked)
    if asked.model == TINY:
        dtype = getattr(torch, asked.dtype or "float32")
        model = tiny(max_position_embeddings=TINY_POSITIONS).to(dtype)
        letters = [ord(letter) % model.config.vocab_size for letter in text]
        about = {"digest": digest(model), "dtype": str(dtype).removeprefix("torch."), "device": "cpu", "positions": TINY_POSITIONS}
        return Meter(Engine(model, calibration=lambda: letters), letters), about
    from ..harness.worker import Worker

    worker = Worker(asked.model or DEFAULT, {"dtype": asked.dtype} if asked.dtype else {}, {})
    return Meter(worker.lm.engine, worker.lm.tok_encode(text)), worker.described()


def prompts_text(asked: Asked) -> str:
    """Return the text that prompts are cut from."""
    return (Path(asked.text) if asked.text else room("tasks") / "calibration.txt").read_text(encoding="utf-8")


def cap(most: int | None, device: torch.device) -> None:
    """Let this process take `most` bytes: on CUDA of the device, else of memory, what it has taken so far among them.

    Raises UsageError where the model alone has taken as much.
    """
    if most is None:
        return
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / torch.cuda.get_device_properties(device).total_memory), device)
        return
    try:
        import resource
    except ImportError:
        raise UsageError("memory-cap needs a system that limits processes, which this one does not: leave it out") from None
    taken = psutil.Process().memory_info()
    if taken.rss >= most:
        raise UsageError(f"memory-cap={most} bytes are less than the {taken.rss} that the model takes by itself: give more")
    resource.setrlimit(resource.RLIMIT_AS, (taken.vms + most - taken.rss,) * 2)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory; PyTorch has no class of its own for the CPU's."""
    says = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in says or "memory" in says or "new thread" in says
