"""Chooses the next token from logits as generation arguments ask; knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError, nearest

KNOWN = ("do_sample", "temperature", "top_k", "top_p", "seed")


def sampler(given: Mapping[str, Any]) -> Callable[[Tensor], int] | None:
    """Return what picks a token from logits [V]; None for greedy decoding. Raises UsageError for arguments it does not honour."""
    for name in given:
        if name not in KNOWN:
            raise UsageError(f"generation argument {name!r} is not supported{nearest(name, KNOWN)}: give {', '.join(KNOWN)}")
    temperature = float(given.get("temperature", 1.0 if given.get("do_sample") else 0.0) or 0.0)
    if not given.get("do_sample", temperature > 0) or temperature == 0.0:
        return None
    generator = torch.Generator().manual_seed(int(given.get("seed", 0)))
    top_k, top_p = int(given.get("top_k") or 0), float(given.get("top_p") or 1.0)

    def choose(logits: Tensor) -> int:
        odds = _nucleus((logits.float().cpu() / temperature), top_k, top_p)
        return int(torch.multinomial(odds, 1, generator=generator))

    return choose


def _nucleus(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the odds [V] of the `top_k` likeliest tokens (0 for all) that make up the share `top_p`."""
    ordered, order = logits.softmax(-1).sort(descending=True, stable=True)
    ordered[top_k or len(ordered) :] = 0
    ordered /= ordered.sum()
    ordered[(ordered.cumsum(0) - ordered) >= top_p] = 0
    return torch.zeros_like(ordered).scatter(0, order, ordered)
