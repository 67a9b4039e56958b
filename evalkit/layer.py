"""What is fixed about one attention layer, and how it turns scores into weights; knows no cache and no policy.

Shapes: B sequences, H key/value heads, G query heads per key/value head, T new tokens, S slots, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import additive


@dataclass(frozen=True, eq=False)
class Layer:
    """What is fixed about one attention layer of a model."""

    index: int = 0
    depth: int = 1  # attention layers in the model
    scaling: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None  # [H, G] a logit that each query head spends on no entry (GPT-OSS)
    window: int | None = None  # sliding window, in tokens
    rope: Tensor | None = None  # [rotated dims / 2] inverse frequencies, where keys are rotated by position

    def attention(self, query: Tensor, keys: Tensor, visible: Tensor | None) -> Tensor:
        """Return attention weights [B, H, G, T, S], in fp32 (fp64 for fp64 models).

        `query` [B, H, G, T, D], `keys` [B, H, S, D]. `visible` broadcasts to [B, H, G, T, S]; as numbers, 0 and -inf, it is
        [G * T, S]; None: every query sees every slot.
        """
        batch, heads, group, count, size = query.shape
        asked, held = exact(query).reshape(batch * heads, group * count, size), exact(keys).flatten(0, 1).transpose(1, 2)
        if visible is not None and visible.is_floating_point() and self.softcap is None:
            scores = torch.baddbmm(visible, asked, held, alpha=self.scaling)
        else:
            scores = torch.bmm(asked, held).mul_(self.scaling)
            if self.softcap is not None:
                scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
            if visible is not None:
                scores = self.hidden(scores, visible, (batch, heads, group, count, keys.shape[2]))
        scores = scores.view(batch, heads, group, count, keys.shape[2])
        if self.sinks is None:
            return scores.softmax(-1)
        spent = self.sinks.to(scores).view(1, heads, group, 1, 1).expand(batch, -1, -1, count, -1)
        return torch.cat([scores, spent], dim=-1).softmax(-1)[..., :-1]

    @staticmethod
    def hidden(scores: Tensor, visible: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Take what is not visible out of scores [B * H, G * T, S]."""
        if visible.is_floating_point():
            return scores.add_(visible)
        if not scores.is_cpu:
            return scores.view(shape).masked_fill_(~visible, float("-inf"))
        return scores.view(shape).add_(additive(visible, scores.dtype))


class Head(NamedTuple):
    """What a key/value head of a layer is like."""

    layer: Layer
    key_size: int
    value_size: int

    @property
    def size(self) -> int:
        """Elements of one entry's key and value together."""
        return self.key_size + self.value_size

    def live(self, tokens: int) -> int:
        """Return how many of `tokens` it could hold: all, or a sliding window of them."""
        return tokens if self.layer.window is None else min(tokens, self.layer.window)


def exact(tensor: Tensor) -> Tensor:
    """Return the tensor in the precision that scores are made in: fp32, or fp64 where it has that."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
