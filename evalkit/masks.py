"""Masks, and what makes them: which slots score highest, what causal queries see, in how large blocks; knows no cache and no policy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20  # attention weights made at once: memory stays linear in the prompt


def highest(scores: Tensor, count: Tensor | int, among: Tensor) -> Tensor:
    """Return the `count` highest scores [..., S] among the mask `among`, as a mask; ties go to the earlier slot.

    `count` is a number or a tensor that broadcasts to the scores' leading axes.
    """
    scores = scores.masked_fill(~among, float("-inf"))
    wanted = count[..., None] if isinstance(count, Tensor) else torch.tensor([count], device=scores.device)
    fewest, most = (min(int(limit), scores.shape[-1]) for limit in wanted.aminmax())
    if most < 1:
        return torch.zeros_like(among)
    best = scores.topk(most, dim=-1, sorted=fewest < most).values  # far cheaper than a stable sort
    last = wanted.clamp(1, most).sub(1).expand(*best.shape[:-1], 1)
    least = best.gather(-1, last) if fewest < most else best.amin(-1, keepdim=True)
    chosen = (scores >= least) & among & (wanted > 0)
    if not bool((chosen.sum(-1, keepdim=True) > wanted).any()):
        return chosen
    above = chosen & (scores > least)
    equal = chosen & ~above
    return above | (equal & (equal.cumsum(-1) <= wanted - above.sum(-1, keepdim=True)))


def pieces(count: int, each: int) -> Iterator[tuple[int, int]]:
    """Cut `count` queries, of which `each` makes so many weights, into blocks of at most BLOCK_ELEMENTS."""
    size = max(1, BLOCK_ELEMENTS // max(1, each))
    return ((start, min(start + size, count)) for start in range(0, count, size))


@lru_cache(maxsize=64)
def causal(count: int, before: int, slots: int, device: torch.device) -> Tensor:
    """[1, 1, 1, T, S] the mask of `count` queries in a row after `before` slots; small ones come up again and again."""
    return torch.ones(count, slots, dtype=torch.bool, device=device).tril(before)[None, None, None]


@lru_cache(maxsize=64)
def hidden(count: int, before: int, slots: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[G * T, S] as `causal`, in numbers to be added to scores: 0 and -inf."""
    mask = torch.zeros(count, slots, dtype=dtype, device=device)
    return mask.masked_fill(~causal(count, before, slots, device)[0, 0, 0], float("-inf")).repeat(group, 1)


def listed(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return where `mask` [B, H, S] is set, [B, H, W]; and which of these places are meant (None: all)."""
    counts, found = mask.sum(-1), mask.nonzero()[:, 2]
    width = int(counts.max()) if counts.numel() else 0
    if len(found) == counts.numel() * width:
        return found.view(*counts.shape, width), None
    used = torch.arange(width, device=mask.device) < counts[..., None]
    return counts.new_zeros(used.shape).masked_scatter_(used, found), used


@lru_cache(maxsize=64)
def counted(batch: int, heads: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, H, T] the positions of tokens taken in from the start, and [B] how many they are."""
    places = torch.arange(count, device=device).expand(batch, heads, -1)
    return places, torch.full((batch,), count, dtype=torch.long, device=device)


@lru_cache(maxsize=64)
def equal(batch: int, heads: int, slots: int, device: torch.device) -> Tensor:
    """[B, H] how many entries heads hold that hold one in each slot."""
    return torch.full((batch, heads), slots, dtype=torch.long, device=device)
