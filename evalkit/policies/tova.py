"""TOVA: drop the entries that the newest token attends to least."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..policy import LayerCache, Policy, Presets, granted


@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Keep the entries with the largest attention from the newest token, averaged over all heads of the layer, at every token.

    Paper: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104. All heads of a layer keep the same entries and
    nothing is forced to stay. `tova:kvpress` acts when a prompt or message is whole only, and always keeps the newest token.
    """

    every_step: bool = True
    keep_newest: bool = False

    paper: ClassVar[str] = "https://arxiv.org/abs/2401.06104"
    presets: ClassVar[Presets] = {"kvpress": {"every_step": False, "keep_newest": True}}

    @property
    def static(self) -> bool:
        return not self.every_step

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        if not (cache.complete or self.every_step):
            return cache
        weights = cache.weights(query if query.shape[3] == 1 else query[:, :, :, -1:])
        newest = weights.mean((1, 2, 3))[:, None].expand_as(cache.positions)
        if self.keep_newest:
            newest = newest.masked_fill(cache.positions == cache.seen[:, None, None] - 1, float("inf"))
        return cache.keep_best(newest, granted(cache))
