"""Random eviction: the floor that every method must beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..policy import LayerCache, Natural, Policy, Presets, granted

_POSITION, _HEAD, _LAYER, _SEED, _PRIME = 0x9E3779B1, 0x85EBCA6B, 0x27D4EB2F, 0xC2B2AE3D, 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keep entries drawn at random, each head its own, when a prompt or message is whole.

    The draw is a hash of seed, layer, head and position: it is the same at every batch size, and an entry that lost once stays
    lost. Used as a baseline since Zhang et al. (H2O), arXiv 2306.14048.
    """

    seed: Natural = 0
    every_step: bool = False  # evict at every decoded token, too

    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    presets: ClassVar[Presets] = {"every-step": {"every_step": True}}

    @property
    def static(self) -> bool:
        return not self.every_step

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        if not (cache.complete or self.every_step):
            return cache
        return cache.keep_best(self.draw(cache), granted(cache))

    def draw(self, cache: LayerCache) -> Tensor:
        """[B, H, S] a number for each entry, the same wherever its sequence is computed."""
        heads = torch.arange(cache.positions.shape[1], device=cache.positions.device)[:, None]
        place = (cache.positions + 1) * _POSITION + (heads + 1) * _HEAD + (cache.layer.index + 1) * _LAYER + self.seed * _SEED
        for shift in (15, 13):
            place = ((place ^ (place >> shift)) * _HEAD) % _PRIME
        return place.double()
