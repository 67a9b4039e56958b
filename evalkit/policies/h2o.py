"""H2O, the heavy-hitter oracle: keep the newest tokens and those that have drawn the most attention."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..policy import LayerCache, Policy, Presets, granted, last, top


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Half of the allowance goes to the newest tokens, the rest to heavy hitters: entries with the largest accumulated attention.

    Paper: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", arXiv 2306.14048.
    The default follows the comparative study arXiv 2604.05012: heavy hitters are chosen once a prompt or message is whole, by the
    attention its tokens paid, and decoding adds entries without forgetting any. `h2o:paper` evicts at every token, as the paper
    does. Under GQA the scores of a query group are summed, so a key/value head keeps one set.
    """

    every_step: bool = False  # evict at every decoded token (the paper) or only when a prompt or message is whole (the study)

    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    presets: ClassVar[Presets] = {"paper": {"every_step": True}}

    @property
    def static(self) -> bool:
        return not self.every_step

    def observe(self, cache: LayerCache, query: Tensor) -> LayerCache:
        received = cache.received(query).sum(2)
        return cache.mark("received", cache.marks["received"] + received if "received" in cache.marks else received)

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        if not (cache.complete or self.every_step):
            return cache
        allowance = granted(cache)
        near = last(cache, (allowance + 1) // 2)
        heavy = top(cache.marks["received"], (allowance // 2)[:, None], cache.filled & ~near)
        return cache.keep(near | heavy)
