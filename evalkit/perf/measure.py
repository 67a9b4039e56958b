"""Measures one policy on prompts of given lengths: seconds, memory, entries held and read; knows engines, and neither runs nor tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .. import attention, masks
from ..cache import LayerCache
from ..counters import Counters, Tally
from ..errors import UsageError
from ..footprint import Footprint
from ..group import Group
from ..memory import Branch
from ..pace import pace
from ..policies import build
from ..policy import Policy
from ..session import Engine, Session
from ..shares import QUANTITIES
from ..size import Load, sizes
from .asked import Cell
from .mass import Look, looks

Point = dict[str, Any]
WARM, SAYS = 64, 2  # tokens of the prompt that a policy warms up on, and those it says then


class Uncounted(Counters):
    """Counters that count nothing but the seconds that prompts and steps take."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    def count(self, name: str, number: int) -> None:
        pass


class Naive(Engine):
    """An engine that takes in prompts in one block, whatever their length."""

    def blocks(self, count: int, branches: Sequence[Branch]) -> list[tuple[int, int]]:
        return [(0, count)]


@contextmanager
def in_one_piece() -> Iterator[None]:
    """Make all attention weights of a block at once, T x T, as implementations do that hand them to a policy."""
    before, masks.BLOCK_ELEMENTS = masks.BLOCK_ELEMENTS, sys.maxsize
    try:
        yield
    finally:
        masks.BLOCK_ELEMENTS = before
        for known in (masks.causal, masks.hidden):  # masks of a whole prompt, T x T, too
            known.cache_clear()


@dataclass
class Meter:
    """A model under measurement, and the text that prompts are cut from."""

    engine: Engine
    text: Sequence[int]

    def warm_up(self, cell: Cell) -> None:
        """Run a cell on a short prompt: what is done once for a model or a process is done then."""
        self.run(cell, [self.prompt(WARM)], SAYS, look=False)

    def measure(self, cell: Cell, lengths: Sequence[int], output: int, *, look: bool = False) -> tuple[Point, list[Look]]:
        """Return what a cell took for prompts of these lengths and `output` tokens after each, and with `look` what a step met."""
        prompts = [self.prompt(length, number) for number, length in enumerate(lengths)]
        with Footprint(self.engine.device) as footprint:
            point, met = self.run(cell, prompts, output, look=look)
        return {**point, "memory": footprint.as_dict()}, met

    def run(self, cell: Cell, prompts: Sequence[Sequence[int]], output: int, *, look: bool) -> tuple[Point, list[Look]]:
        """Take in the prompts, then say `output` tokens after each."""
        policy, engine = build(cell.policy, cell.budget), self.naive if cell.naive else self.engine
        kind, device = Counters if cell.counted else Uncounted, engine.device
        counters = engine.counters = kind(waits_for=device if device.type == "cuda" else None)
        tally = Tally(1, device) if cell.counted else None
        group = Group(engine, [engine.open(policy, tally=tally) for _ in prompts])
        with in_one_piece() if cell.naive else nullcontext():
            group.feed(prompts)
        held = accounts(group.sessions, policy) if cell.counted else {}
        fork = group.sessions[0].fork() if look else None
        group.generate(output, lambda said: False)
        tokens = sum(len(prompt) for prompt in prompts)
        point: Point = pace(counters.firsts, counters.steps, counters.seconds, tokens, output * len(prompts))
        point |= {"prompt_tokens": tokens, "output_tokens": output * len(prompts), "seconds": counters.seconds}
        if tally is not None:
            point |= {"held": held, "tally": dict(zip(QUANTITIES, tally.totals()[:, 0].tolist(), strict=True))}
        engine.counters = Counters()  # what comes is no part of what is measured
        return point, looks(fork) if fork else []

    def prompt(self, length: int, number: int = 0) -> list[int]:
        """Return `length` tokens of the text, which comes round again where it is short; each number begins at another place."""
        start = number * len(self.text) // 7
        return [self.text[(start + place) % len(self.text)] for place in range(length)]

    @cached_property
    def naive(self) -> Naive:
        """The engine for cells that are measured the naive way."""
        return Naive(self.engine.model, "eager", calibration=self.engine.calibration)


def accounts(sessions: Sequence[Session], policy: Policy) -> dict[str, list[int]]:
    """Return what each layer holds of all sessions: entries, bytes on the device and in host memory.

    Raises UsageError where the policy's own account, by which `evalkit size` reckons, says another number of entries.
    """
    layers = [[layer(policy, session.caches[index]) for session in sessions] for index in range(len(sessions[0].caches))]
    held = [[sum(part) for part in zip(*each, strict=True)] for each in layers]
    shape = attention.shape(sessions[0].engine.model.config)
    reckoned = [sizes(policy, shape, Load(tokens=session.seen)) for session in sessions]
    expected = [sum(size.entries for size in sizes) for sizes in zip(*reckoned, strict=True)]
    if (entries := [one for one, _, _ in held]) != expected:
        raise UsageError(
            f"{type(policy).__name__} holds {sum(entries)} entries after the prompt where its own account says {sum(expected)}: check "
            "the policy with `evalkit check`"
        )
    return {"entries": entries, "device_bytes": [one for _, one, _ in held], "host_bytes": [one for _, _, one in held]}


def layer(policy: Policy, cache: LayerCache) -> tuple[int, int, int]:
    """Return the entries that a layer holds, and its bytes on the device and in host memory, at 2 bytes an element."""
    holding = cache.holding()
    stored, about = int(holding.stored().sum()), int(holding.about().sum())
    about = 0 if policy.lossless else about  # under a budget of everything nothing need be noted
    return int(holding.entries.sum()), *((about, stored) if policy.host else (stored + about, 0))
