"""The job of a reply that is replayed: all of its tokens taken in at once, where none changes what another one holds or reads.

Knows no single policy. Shapes: H key/value heads, G queries per head, T tokens, S slots, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import kernels
from .cache import LayerCache
from .counters import Counters
from .kernels import Kernel
from .memory import Cell, State, observing
from .picking import narrowed
from .tokens import Places, Tokens


@dataclass
class Reply:
    """A reply's tokens taken in at once after what a session holds: none of them changes what another one holds or reads.

    Policies that leave decoded tokens alone until a message ends take replies in so, and those whose queries choose each by itself.
    """

    index: Tensor  # [1, T] the row's tokens
    cell: Cell
    state: State  # what is held, before and after

    def __post_init__(self) -> None:
        self.places = Places(self.index)

    def attend(self, tokens: Tokens, counters: Counters) -> None:
        """Attend from each token to what is held and the tokens before it, as it chooses."""
        held, query = self.state.caches[tokens.layer.index], tokens.queries(self.places)
        cache = held.append(*tokens.entries(self.places), decoding=True, complete=False)
        policy, drawn, matter = self.cell.policy, None, tokens.matter(self.places)
        if matter and "received" in policy.needs and not kernels.fused(tokens.kernel, query):
            with counters.phase("attention"):
                output, drawn = kernels.drawing(cache, query)
        with counters.phase("policy"):
            cache = observing(policy, cache, query, drawn)
        if matter:
            if drawn is None:
                output = self.attention(replace(cache, guess=tokens.guesses(self.places)), query, tokens.kernel, counters)
            tokens.put(self.places, output)
        self.state.caches[tokens.layer.index] = self.cell.stowed(cache.expired())

    def attention(self, cache: LayerCache, query: Tensor, kernel: Kernel, counters: Counters) -> Tensor:
        """Attend from the tokens' queries [1, H, G, T, D], each to what it chooses; block by block, while what is chosen by is at hand."""
        count, blocks = query.shape[3], cache.blocks(query.shape[3], query.shape[2])
        entries: tuple[Tensor, Tensor] | None = None
        outputs: list[Tensor] = []
        for start, stop in blocks if self.cell.policy.overrides("read") else ():
            asked, mask = query[:, :, :, start:stop], cache.visible(count, start, stop)
            with counters.phase("policy"):
                chosen = self.chosen(cache, asked, mask, start)
            if chosen is None and not outputs:
                break
            with counters.phase("attention"):
                entries = entries or cache.entries.dense()
                few = narrowed(*entries, mask if chosen is None else chosen)
                outputs.append(kernels.under(cache.layer, asked, *few, kernel))
        with counters.phase("attention"):
            return torch.cat(outputs, dim=3) if outputs else kernels.whole(cache, query, kernel)

    def chosen(self, cache: LayerCache, query: Tensor, mask: Tensor, start: int) -> Tensor | None:
        """[1, H, 1 or G, t, S] what each of t tokens, the first of them number `start`, chooses of `mask`, and itself; None for all."""
        now, own = slice(start, start + query.shape[3]), torch.zeros_like(mask)
        own.diagonal(cache.slots - self.index.shape[1] + start, 3, 4).fill_(True)
        guess = None if cache.guess is None else cache.guess[:, :, :, now]
        read = self.cell.policy.read(replace(cache, choices=mask & ~own, guess=guess), query)
        return None if read is None else mask & (read | own)
