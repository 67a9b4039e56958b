"""Runs packed rows on a model: policies set to work, prompts taken in whole or in blocks. Knows tokens; no text and no task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from . import attention, kernels
from .attention import PreTrainedModel
from .calibration import prepared, projections, text
from .counters import Counters, Tally
from .errors import UsageError
from .memory import Begun, Block, Branch, Cell, State
from .offload import Host
from .packing import Packing
from .policy import Policy
from .row import Row
from .settings import Offload, refuse_offload


@dataclass
class Runner:
    """A model ready to run policies. `row_tokens` are packed into a forward pass; prompts over `prefill_chunk` tokens arrive in chunks.

    Policies add up what they observe over the chunks and act on the whole, so that what they keep does not depend on them.
    """

    model: PreTrainedModel
    attn: str = "sdpa"
    row_tokens: int = 1024
    prefill_chunk: int = 4096
    row_documents: int | None = None  # at most so many documents share a row
    calibration: Callable[[], Sequence[int]] | None = None  # tokens of the text that policies prepare on
    offload: Offload = "auto"  # whether entries live in host memory; auto: where the policy says so
    counters: Counters = field(default_factory=Counters)
    host: Host = field(default_factory=Host)
    _begun: Begun | None = field(default=None, repr=False)
    _prepared: dict[Policy, Sequence[Mapping[str, Tensor]]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.kernel = kernels.known(self.attn, self.device)
        attention.attach(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The sliding windows that some layers may have."""
        window = getattr(self.model.config, "sliding_window", None)
        return () if window is None else (window,)

    def cell(self, policy: Policy, tally: Tally | None = None) -> Cell:
        """Set a policy to work on this model: prepare it where it asks for that."""
        if "rope" in policy.needs and not attention.ropes(self.model):
            raise UsageError(
                f"{type(policy).__name__} rotates keys to new positions and {self.model.config.model_type} models do not rotate them: "
                "use its preset 'original'"
            )
        host = self.host if self.offloads(policy) else None
        if not policy.overrides("prepare"):
            return Cell(policy, (), tally, self.fetches(policy), host)
        key = policy.statistic()
        if key not in self._prepared:
            with self.counters.phase("prepare"):
                self._prepared[key] = prepared(policy, self)
        return Cell(policy, self._prepared[key], tally, self.fetches(policy), host)

    def offloads(self, policy: Policy) -> bool:
        """Whether the policy's entries live in host memory. Raises UsageError where they cannot."""
        refuse_offload(policy, self.offload)
        return policy.host if self.offload == "auto" else bool(self.offload)

    def fetches(self, policy: Policy) -> bool:
        """Whether what the policy reads counts as fetched from host memory; with offload=false it is not, yet would be."""
        return policy.host or self.offloads(policy)

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        """Return each attention layer's queries [1, H, G, T, D] and keys [1, H, T, D], rotated, on the calibration text."""
        return projections(self.model, text(self.model, self.calibration), self.kernel)

    def run(self, packing: Packing, length: int = 0) -> Tensor:
        """Run a packed row; return the logits [W, V] at its readout's places, each place once, in order.

        Of prompts, messages and replies that no prediction is read of, the last layer makes entries alone. A rotation that follows the
        length is that of a sequence of `length` tokens where the row's own are fewer.
        """
        wanted = sorted(set(packing.readout.places))
        if length and attention.follows_length(self.model.config):
            packing.place((0,), length - 1)  # nothing attends to it
        row = Row(packing.jobs, self.counters, self.kernel, frozenset(wanted))
        self.counters.count("computed", len(packing.tokens))
        self.counters.count("predicted", len(wanted))
        with self.counters.phase("forward"):
            return attention.run(
                self.model,
                row,
                packing.tokens,
                packing.positions,
                wanted,
            )

    def begin(self, tokens: tuple[int, ...], cells: Sequence[Cell]) -> Begun:
        """Take in what all prompts begin with, unless it was taken in last."""
        statistics = {cell.policy.statistic(): cell for cell in cells}
        if self._begun is None or self._begun.tokens != tokens or not statistics.keys() <= self._begun.states.keys():
            branches = [Branch(cell, None, [], State(lasting=True)) for cell in statistics.values()]
            self.take_in(tokens, 0, branches, None, complete=False)
            self._begun = Begun(tokens, {what: branch.state for what, branch in zip(statistics, branches, strict=True)})
        return self._begun

    def take_in(
        self, tokens: Sequence[int], start: int, branches: list[Branch], before: State | None, complete: bool = True
    ) -> None:
        """Take in a prompt or message whole, in blocks where it is long; the branches' policies act at its end."""
        for first, last in self.blocks(len(tokens), branches):
            packing = Packing()
            index = torch.tensor([packing.place(tokens[first:last], start + first)])
            ends = complete and last == len(tokens)
            packing.jobs.append(Block(index, last - first, branches, before, ends))
            self.run(packing, start + len(tokens) + 1)
            before = branches[0].state

    def blocks(self, count: int, branches: Sequence[Branch]) -> list[tuple[int, int]]:
        """Cut a prompt into chunks; the last one is made long enough to hold every policy's observation window.

        Where a rotation follows the length, all keys of a prompt must be rotated alike: it is taken in whole.
        """
        if attention.follows_length(self.model.config):
            return [(0, count)]
        window = max(branch.cell.policy.observed for branch in branches)
        starts = list(range(0, max(count - window, 0) + 1, self.prefill_chunk))
        return list(zip(starts, [*starts[1:], count], strict=True))
