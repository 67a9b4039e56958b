"""H2O, the heavy-hitter oracle: keep the newest tokens and those that have drawn the most attention."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..policy import Head, Holding, LayerCache, Policy, Presets, granted, last, top


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Half of the allowance goes to the newest tokens, the rest to heavy hitters: entries with the largest accumulated attention.

    Paper: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", arXiv 2306.14048.
    The default follows the comparative study arXiv 2604.05012: heavy hitters are chosen once a prompt or message is whole, by the
    attention its tokens paid, and decoding adds entries without forgetting any. `h2o:paper` evicts at every token, as the paper
    does. Under GQA the scores of a query group are summed, so a key/value head keeps one set.

    `h2o:repo-llama` and `h2o:repo-opt` are what the authors' lm-eval harness (FMInference/H2O, commit ac75c2a) measures for LLaMA and
    for OPT and GPT-NeoX: a simulation in one pass over prompt and answer, in which half of the budget counts heavy hitters and half
    a recent band, of all tokens together. The first ranks heavy hitters by the attention of all rows, those of the answer included,
    so it looks ahead; the second runs the race row by row. (Their harness also reports mean log-probabilities; here they are sums.)
    """

    every_step: bool = False  # evict at every decoded token (the paper) or only when a prompt or message is whole (the study)
    simulate: Literal["global", "local"] | None = None  # the authors' harness: heavy hitters by all rows, or row by row

    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    presets: ClassVar[Presets] = {
        "paper": {"every_step": True},
        "repo-llama": {"simulate": "global"},
        "repo-opt": {"simulate": "local"},
    }

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"whole_answer"} if self.simulate else {"received"})

    @property
    def static(self) -> bool:
        return not self.every_step

    def holding(self, head: Head, tokens: int) -> Holding[int]:
        if self.simulate:  # nothing is forgotten and nothing noted
            return Policy().holding(head, tokens)
        held = super().holding(head, tokens)
        return replace(held, noted=held.entries)

    def observe(self, cache: LayerCache, query: Tensor) -> LayerCache:
        received = cache.received(query).sum(2)
        return cache.mark("received", cache.marks["received"] + received if "received" in cache.marks else received)

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        if not (cache.complete or self.every_step):
            return cache
        allowance = granted(cache)
        near = last(cache, (allowance + 1) // 2)
        return cache.keep_best(cache.marks["received"].masked_fill(near, float("inf")), allowance)

    def within(self, cache: LayerCache, query: Tensor) -> Tensor | None:
        if cache.allowance is None:
            return None
        (part,) = (cache.allowance // 2).unique().tolist()  # sequences of a simulation are of one length
        received = cache.received if self.simulate == "global" else None
        heavy = self.race(cache.weights(query).sum(2), part) if received is None else self.best(received(query).sum(2), part)
        rows = torch.arange(cache.slots, device=query.device)
        near = rows[:, None] - rows <= part
        return (heavy | near)[:, :, None]

    @staticmethod
    def best(received: Tensor, count: int) -> Tensor:
        """[B, H, 1, S] the `count` columns with the most attention of all rows, the same for every row."""
        return top(received, count, torch.ones_like(received, dtype=torch.bool))[:, :, None]

    @staticmethod
    def race(weights: Tensor, count: int) -> Tensor:
        """[B, H, T, S] each row's heavy set: its own token and the `count` - 1 that lead until then; who drops out stays out."""
        heavy = torch.zeros_like(weights, dtype=torch.bool)
        if count == 0:
            return heavy
        heavy[:, :, :count, :count] = True
        total = weights[:, :, :count].sum(2)
        everything = torch.ones_like(total, dtype=torch.bool)
        for row in range(count, weights.shape[2]):
            keep = top(total, count - 1, everything)
            keep[:, :, row] = True
            heavy[:, :, row] = keep
            total = (total + weights[:, :, row]) * keep
        return heavy
