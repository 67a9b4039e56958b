"""Prompt and answer taken in together under a policy's mask, as published harnesses simulate a policy; knows no single policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import kernels
from .cache import LayerCache
from .counters import Counters
from .memory import Cell, Grants, State
from .tokens import Places, Tokens


@dataclass
class Simulated:
    """Whole sequences of equal length, each token reading what the policy's `within` lets it: nothing is ever forgotten."""

    index: Tensor  # [B, T] the row's tokens of each sequence, prompt and answer
    cell: Cell
    documents: Sequence[int]  # [B] their numbers in the tally
    grants: Grants  # of prompt and answer
    answers: Tensor  # [B, T] whether the token's prediction is scored
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        self.places = Places(self.index)

    def attend(self, tokens: Tokens, counters: Counters) -> None:
        """Attend under the policy's mask."""
        keys, values = tokens.entries(self.places)
        cache = self.cell.entitled(LayerCache.empty(tokens.layer, keys, len(self.index)).append(keys, values), self.grants)
        query, count = tokens.queries(self.places), self.index.shape[1]
        with counters.phase("policy"):
            read = self.cell.policy.within(cache, query)
        visible = cache.visible(count)
        allowed = visible if read is None else visible & read
        with counters.phase("attention"):
            mask = lambda start, stop: allowed[:, :, :, start:stop]  # noqa: E731
            blocks = cache.blocks(count, query.shape[2])
            tokens.put(self.places, kernels.masked(tokens.layer, query, keys, values, mask, blocks, tokens.kernel))
        self.cell.count_held(self.documents, cache)
        self.count(cache, allowed, visible)

    def count(self, cache: LayerCache, allowed: Tensor, visible: Tensor) -> None:
        """Count what the scored tokens read: a query group's reads by their union."""
        heads = cache.positions.shape[1]
        of_answers = lambda mask: ((mask.any(2).sum(-1).to(torch.float64).mean(1)) * self.answers).sum(1) * heads  # noqa: E731
        self.cell.count_read(self.documents, cache, of_answers(allowed), of_answers(visible), self.answers.sum(1))
