"""Quest: read only the pages whose keys could attend most to the query at hand."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..policy import Head, Holding, LayerCache, Natural, Policy, Positive, Presets, exact, top


@dataclass(frozen=True, kw_only=True)
class Quest(Policy):
    """Keep every entry, in pages of neighbouring tokens; each query reads the pages with the highest bound on its scores.

    Paper: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv 2406.10774. A page is known
    by the largest and smallest value of each key channel, which bound what any of its keys can score. The allowance buys whole
    pages, at least `least`; no page is forced, and the token being decoded is read on top. The first `dense_layers` read all.
    A key/value head reads one set of pages, by the highest bound in its query group. The authors' code chooses for each query
    head (`quest:per_query_head`) and reads three pages at least (`quest:repo` does both). Their faster code always reads the page that
    is being filled, as one of those that the allowance buys: its few keys promise little against full pages'. `quest:newest` does so,
    too, but for a token that opens a page, which reads the page before (theirs has its own entry only).
    """

    page: Positive = 16
    least: Positive = 1  # pages read however small the budget
    dense_layers: Natural = 2
    per_query_head: bool = False
    newest: bool = False  # always read the page of the newest token held

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.10774"
    presets: ClassVar[Presets] = {
        "repo": {"least": 3, "per_query_head": True},
        "per_query_head": {"per_query_head": True},
        "newest": {"newest": True},
    }

    @property
    def floor(self) -> int:
        return self.least * self.page

    def acts_on(self, tokens: int) -> bool:
        allowance = self.budget.allowance(tokens)
        return allowance < tokens and max(self.least, allowance // self.page) * self.page < tokens

    def holding(self, head: Head, tokens: int) -> Holding[int]:
        held = super().holding(head, tokens)
        if head.layer.index < self.dense_layers:
            return held
        pages = min(self.places(tokens, head.layer.window), -(-tokens // self.page))
        return replace(held, noted=pages * 2 * head.key_size)

    def read(self, cache: LayerCache, query: Tensor) -> Tensor | None:
        if cache.allowance is None or cache.layer.index < self.dense_layers:
            return None
        bounds = self.scores(cache, query)
        if self.newest:
            bounds = bounds.masked_fill(self.filling(cache, bounds.shape[-1])[:, None, None], float("inf"))
        among = self.reachable(cache, bounds.shape[-1])[:, None, None].expand_as(bounds)
        chosen = top(bounds, self.affordable(cache)[:, None, None], among)
        place = (cache.positions // self.page % bounds.shape[-1])[:, :, None]
        return chosen.gather(3, place.expand(-1, -1, bounds.shape[2], -1))[:, :, :, None]

    def scores(self, cache: LayerCache, query: Tensor) -> Tensor:
        """[B, H, 1 or G, P] the most that any key of each page can score with the query [B, H, G, 1, D], unscaled."""
        asked = _signed(exact(query[:, :, :, 0])).clamp(min=0)
        bounds = torch.matmul(asked, exact(cache.notes["bounds"]).transpose(2, 3))
        return bounds if self.per_query_head else bounds.amax(2, keepdim=True)

    def reachable(self, cache: LayerCache, places: int) -> Tensor:
        """[B, P] which pages hold tokens that the next query may attend to."""
        numbers = self.numbers(cache.seen, places)
        if cache.layer.window is None:
            return numbers >= 0
        return (numbers >= 0) & ((numbers + 1) * self.page > cache.seen[:, None] - cache.layer.window + 1)

    def filling(self, cache: LayerCache, places: int) -> Tensor:
        """[B, P] which page holds the newest token."""
        return self.numbers(cache.seen, places) == (cache.seen[:, None] - 1) // self.page

    def affordable(self, cache: LayerCache) -> Tensor:
        """[B] the pages that the allowance buys; all of them where it covers every token."""
        assert cache.allowance is not None
        return (cache.allowance // self.page).clamp(min=self.least).where(cache.allowance < cache.tokens, cache.slots)

    def observe(self, cache: LayerCache, query: Tensor) -> LayerCache:
        """Widen the pages' bounds, [B, H, P, 2 D], by the keys that are new."""
        if cache.layer.index < self.dense_layers:
            return cache
        keys = _signed(cache.entries.newest(cache.fresh)[0])
        known = cache.notes.get("bounds", keys[:, :, :0])
        places = max(self.places(cache.slots, cache.layer.window), known.shape[2])
        before, after = self.numbers(cache.seen - cache.fresh, places), self.numbers(cache.seen, places)
        known = pad(known, (0, 0, 0, places - known.shape[2])).masked_fill(_spread(before != after), float("-inf"))
        page = cache.positions[:, 0, cache.slots - cache.fresh :] // self.page
        passed = page != after.gather(1, page % places)  # a block may be longer than the sliding window
        keys = keys.masked_fill(_spread(passed), float("-inf"))
        return cache.note("bounds", known.scatter_reduce(2, _spread(page % places).expand_as(keys), keys, "amax"))

    # Pages lie at places: page p at place p, or p modulo P where a sliding window lets early pages go

    def places(self, slots: int, window: int | None) -> int:
        """P, the pages of `slots` entries that a layer may have to tell apart."""
        if window is not None and slots >= window:
            return (window + self.page - 2) // self.page + 1
        return -(-slots // self.page)

    def numbers(self, seen: Tensor, places: int) -> Tensor:
        """[B, P] which page is at each place once `seen` [B] tokens are there; negative for none."""
        newest = (seen[:, None] - 1) // self.page
        return newest - (newest - torch.arange(places, device=seen.device)) % places


def _signed(values: Tensor) -> Tensor:
    """Put -x beside x, so that one maximum holds an upper and a lower bound."""
    return torch.cat([values, -values], dim=-1)


def _spread(pages: Tensor) -> Tensor:
    """Give [B, P] the axes of bounds, [B, 1, P, 1]."""
    return pages[:, None, :, None]
