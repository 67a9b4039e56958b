"""A packed row on its way through the layers: its jobs run in order in each, and what the next layer asks for is guessed from this one.

Knows no tokenizer and no transformers. Shapes: N tokens in the row, H key/value heads, G queries per head, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from . import kernels
from .counters import Counters
from .kernels import Kernel
from .layer import Layer
from .memory import Block, Cell, Job, State
from .offload import Host
from .tokens import Places, Tokens


@runtime_checkable
class Foreseeing(Protocol):
    """A job that can tell what its tokens will read before their layer begins."""

    sources: Sequence[tuple[State, Tensor | None]]

    def foresee(self, layer: int, guess: Tensor, counters: Counters) -> None:
        """Choose and fetch what the tokens read in a layer, by the `guess` [N, H x G, D] of the row's queries."""


@dataclass
class Row:
    """A packed row: its jobs, run in order inside every layer."""

    jobs: list[Job]
    counters: Counters
    kernel: Kernel = "sdpa"
    asked: frozenset[int] | None = None  # the places whose predictions are read; None: all
    guess: Tensor | None = None  # the guess for the layer at hand, [1, H x G, N, D]
    previous: Tensor | None = None  # what the layer before was given
    rehearsing: bool = False  # whether a layer runs for its guess only
    ropes: Callable[[], Mapping[str | None, Tensor]] = dict  # inverse frequencies by layer type, as the row needs them
    depth: int = 1  # attention layers in the model
    given: torch.cuda.Event | None = None  # on CUDA: when `previous` is there

    @cached_property
    def host(self) -> Host | None:
        """Where entries that are to be fetched in this row lie, if any do."""
        cells: list[Cell] = [job.cell for job in self.jobs if hasattr(job, "cell")]
        return next((cell.host for cell in cells if cell.host is not None), None)

    @contextmanager
    def ahead(self, device: torch.device) -> Iterator[None]:
        """Queue what is done inside, which needs the previous layer's input alone, beside that layer where entries are fetched."""
        if self.host is None or self.given is None or self.previous is None or self.previous.device != device:
            yield  # where the model goes on on another device, its input is on the way there
            return
        with self.host.ahead(device, self.given):
            yield
            self.host.hand(device, self.guess)

    def foresee(self, layer: int) -> None:
        """Let jobs choose and fetch what their tokens will read in a layer, where no job before them changes what is there."""
        guess, written = self.guess, set[int]()
        if guess is None:
            return
        for job in self.jobs:
            if isinstance(job, Foreseeing) and written.isdisjoint(id(state) for state, _ in job.sources):
                move(job, guess.device)
                job.foresee(layer, guess[0].transpose(0, 1), self.counters)
            written |= {id(state) for state in states(job)}

    def give(self, hidden: Tensor) -> None:
        """Note what a layer is given, from which the next one's queries are guessed."""
        self.previous = hidden
        if self.host is not None and hidden.is_cuda:
            self.given = torch.cuda.current_stream(hidden.device).record_event()

    @cached_property
    def guessing(self) -> Tensor:
        """[M] the tokens whose query is to be guessed from the layer before: those that answer under a policy that asks for it."""
        asked: list[Any] = [job for job in self.jobs if hasattr(job, "cell") and "guess" in job.cell.policy.needs]
        return torch.cat([job.index.flatten() for job in asked]).unique() if asked else torch.empty(0, dtype=torch.long)

    def attend(self, layer: Layer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend in one layer for the whole row: `query` [1, H x G, N, D], `keys`, `values` [1, H, N, D]; returns [1, N, H x G, D]."""
        heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        spread = lambda tensor: tensor[0].transpose(0, 1).unflatten(1, (heads, group))  # noqa: E731
        output = query.new_zeros(query.shape[2], heads, group, values.shape[3])
        guessed = None if self.guess is None else spread(self.guess)
        asked = self.asked if layer.index == self.depth - 1 else None
        tokens = Tokens(
            layer, spread(query), keys[0].transpose(0, 1), values[0].transpose(0, 1), guessed, output, self.kernel, asked
        )
        for job in self.jobs:
            move(job, output.device)
        self.attend_packed(tokens)
        for job in self.jobs:
            job.attend(tokens, self.counters)
        self.forget(layer)
        return output.flatten(1, 2)[None]

    def attend_packed(self, tokens: Tokens) -> None:
        """Attend for all prompts that begin in this row by one flash-attn call, where that kernel is asked for."""
        blocks = [job for job in self.jobs if isinstance(job, Block) and job.attends_packed(tokens)]
        if not blocks:
            return
        places = torch.cat([block.index.flatten() for block in blocks])
        lengths = [block.index.shape[1] for block in blocks for _ in block.index]
        query, keys, values = (part.index_select(0, places) for part in (tokens.query.flatten(1, 2), tokens.keys, tokens.values))
        with self.counters.phase("attention"):
            output = kernels.flash_packed(tokens.layer, query, keys, values, lengths)
        tokens.output.index_copy_(0, places, output.view(-1, *tokens.output.shape[1:]))

    def forget(self, layer: Layer) -> None:
        """Let go of the layer's caches that no session keeps."""
        for job in self.jobs:
            for state in states(job):
                if not state.lasting:
                    state.caches.pop(layer.index, None)


def states(job: Job) -> list[State]:
    """Return the states a job leaves caches in: its own, or its branches'."""
    return [job.state] if hasattr(job, "state") else [branch.state for branch in getattr(job, "branches", ())]


def move(job: object, device: torch.device) -> None:
    """Bring a job's index tensors to the device its layer lives on (models spread over several)."""
    for holder in (job, *getattr(job, "branches", ())):
        for name, value in vars(holder).items():
            if isinstance(value, Tensor) and value.device != device:
                setattr(holder, name, value.to(device))
            elif isinstance(value, Places):
                move(value, device)
