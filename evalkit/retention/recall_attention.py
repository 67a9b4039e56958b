"""The attention of training rows, in blocks; knows masks, and no model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128  # queries that are asked at once: what comes after all of them is left out


def attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **others: Any
) -> tuple[Tensor, None]:
    """[B, T, H, D] what queries [B, H, T, D] find in keys and values [B, G, T, D], each seen by H / G query heads, as transformers asks
    for it; the mask, [B, 1 or H, T, T], lets none see what comes after it.
    """
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    found = []
    for start in range(0, query.shape[2], BLOCK):
        end = min(start + BLOCK, query.shape[2])
        seen = attention_mask[:, :, start:end, :end]
        asked = query[:, :, start:end]
        found.append(
            functional.scaled_dot_product_attention(asked, key[:, :, :end], value[:, :, :end], attn_mask=seen, scale=scaling)
        )
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None
