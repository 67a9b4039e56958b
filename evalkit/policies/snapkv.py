"""SnapKV: the last tokens of a prompt vote, by attention, for the entries worth keeping."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from ..policy import LayerCache, Policy, Positive, Presets, granted, last


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Sum the attention of an observation window at the prompt's end, smooth it by pooling, keep the best entries and the window.

    Paper: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469. Defaults are those of the
    authors' class (window 32, kernel 5, average pooling); `snapkv:longbench` are their benchmark settings, `snapkv:kvpress` those
    of kvpress. The window shrinks to half of the allowance, so that short prompts are still voted on. Votes of a query group are
    summed: a key/value head keeps one set (the authors' code repeats keys and keeps one for each query head).
    """

    window: Positive = 32
    kernel: Positive = 5
    pooling: Literal["avg", "max"] = "avg"

    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_prompt"})
    presets: ClassVar[Presets] = {
        "longbench": {"window": 32, "kernel": 7, "pooling": "max"},
        "kvpress": {"window": 64, "kernel": 5, "pooling": "avg"},
    }

    @property
    def observed(self) -> int:
        return self.window

    @property
    def static(self) -> bool:
        return True

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        if cache.decoding:  # defined on whole prompts only
            return cache
        allowance = granted(cache)
        window = ((allowance + 1) // 2).clamp(max=self.window)
        near = last(cache, window)
        votes = self.pooled(self.votes(cache, query, window).masked_fill(near | ~cache.filled, 0.0))
        return cache.keep_best(votes.masked_fill(near, float("inf")), allowance)

    def votes(self, cache: LayerCache, query: Tensor, window: Tensor) -> Tensor:
        """[B, H, S] the attention that each entry receives from the last `window` [B] queries."""
        widest = min(int(window.max()), query.shape[3])
        weights = cache.weights(query[:, :, :, query.shape[3] - widest :]).sum(2)
        age = torch.arange(widest, 0, -1, device=query.device)
        return (weights * (age <= window[:, None])[:, None, :, None]).sum(2)

    def pooled(self, votes: Tensor) -> Tensor:
        """Smooth votes [B, H, S] along the slots."""
        if self.pooling == "max":
            return max_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)[..., : votes.shape[-1]]
        return avg_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)[..., : votes.shape[-1]]
