"""Key norms: keep the entries whose keys are shortest."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..policy import LayerCache, Policy, Presets, exact, granted


@dataclass(frozen=True, kw_only=True)
class KNorm(Policy):
    """Keep the entries whose keys have the smallest L2 norm: short keys tend to draw much attention.

    Paper: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430. Acts when a
    prompt or message is whole, as the paper's prompt compression does; `knorm:every-step` also acts at every decoded token.
    """

    every_step: bool = False

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.11430"
    presets: ClassVar[Presets] = {"every-step": {"every_step": True}}

    @property
    def static(self) -> bool:
        return not self.every_step

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        if not (cache.complete or self.every_step):
            return cache
        norms = exact(cache.entries.dense()[0]).norm(dim=-1)
        return cache.keep_best(-norms, granted(cache))
