"""Masks, and what makes them: which slots score highest, what causal queries see, in how large blocks; knows no cache and no policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

LONG = 1 << 10  # scores from which rows are partitioned one by one sooner than sorted at once
BLOCK_ELEMENTS = 1 << 20  # attention weights made at once: memory stays linear in the prompt


def highest(scores: Tensor, count: Tensor | int, among: Tensor | None = None) -> Tensor:
    """Return the `count` highest scores [..., S] among the mask `among`, as a mask; ties go to the earlier slot.

    `count` is a number or a tensor that broadcasts to the scores' leading axes. Without `among`, it is those above -inf.
    """
    if among is not None and not (scores.is_cpu and bool(among.all())):
        scores = scores.masked_fill(~among, float("-inf"))
    wanted = count[..., None] if isinstance(count, Tensor) else torch.tensor([count], device=scores.device)
    fewest, most = (min(int(limit), scores.shape[-1]) for limit in wanted.aminmax())
    if most < 1:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = nth(scores, wanted.clamp(1, most).expand(*scores.shape[:-1], 1), most if fewest == most else None)
    chosen = at_least(scores, least)
    if fewest < 1:
        chosen &= wanted > 0
    if among is not None:
        chosen &= among
    elif bool((least == float("-inf")).any()):
        chosen &= scores > float("-inf")
    if not bool((counts(chosen, -1)[..., None] > wanted).any()):
        return chosen
    above = chosen & (scores > least)
    equal = chosen & ~above
    return above | (equal & (equal.cumsum(-1) <= wanted - above.sum(-1, keepdim=True)))


def nth(scores: Tensor, count: Tensor, equal: int | None = None) -> Tensor:
    """[..., 1] the `count`-th highest [..., 1] of the scores [..., S], from 1 on; `equal` is the count where all are.

    On CPUs NumPy partitions and sorts several times faster than PyTorch: the values alone, and by vector instructions.
    """
    if not numpys(scores):
        best = scores.topk(equal or int(count.max()), dim=-1).values
        return best.gather(-1, count.long() - 1)
    values, slots = scores.detach().numpy(), scores.shape[-1]
    if equal:
        return torch.from_numpy(np.partition(values, slots - equal, axis=-1)[..., slots - equal, None])
    places = slots - count.numpy()
    if slots < LONG:
        return torch.from_numpy(np.take_along_axis(np.sort(values, axis=-1), places, axis=-1))
    found = np.empty(places.shape, values.dtype)
    for row in np.ndindex(places.shape[:-1]):
        found[row] = np.partition(values[row], places[row][0])[places[row][0]]
    return torch.from_numpy(found)


# PyTorch goes through masks number by number on CPUs; these take the same steps by vector instructions there


def numpys(scores: Tensor) -> bool:
    """Whether NumPy can look at scores where they lie, in their own precision."""
    return scores.is_cpu and scores.dtype in (torch.float32, torch.float64)


def at_least(scores: Tensor, least: Tensor) -> Tensor:
    """Return which scores are no less than `least`, which broadcasts to them, as a mask."""
    if not numpys(scores):
        return scores >= least
    return torch.from_numpy(np.greater_equal(scores.detach().numpy(), least.detach().numpy()))


def counts(mask: Tensor, *axes: int) -> Tensor:
    """Return how many are set along `axes`."""
    return mask.view(torch.uint8).sum(axes, dtype=torch.int32)


def some(mask: Tensor, axis: int) -> Tensor:
    """Return where any is set along an axis."""
    return mask.view(torch.uint8).amax(axis).view(torch.bool)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a mask is set and -inf where it is not, to be added to scores: 1 - 1 / x."""
    return mask.view(torch.uint8).to(dtype).reciprocal_().neg_().add_(1)


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


def summed(parts: Iterable[Tensor]) -> Tensor:
    """Add up parts [..., R] as they come, each of which reaches at least as far as the one before."""
    total: Tensor | None = None
    for part in parts:
        if total is not None:
            part[..., : total.shape[-1]] += total
        total = part
    assert total is not None
    return total


def listed(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return where `mask` [B, H, S] is set, [B, H, W]; and which of these places are meant (None: all)."""
    numbers, found = mask.sum(-1), mask.nonzero()[:, 2]
    width = int(numbers.max()) if numbers.numel() else 0
    if len(found) == numbers.numel() * width:
        return found.view(*numbers.shape, width), None
    used = torch.arange(width, device=mask.device) < numbers[..., None]
    return numbers.new_zeros(used.shape).masked_scatter_(used, found), used


@lru_cache(maxsize=64)
def counted(batch: int, heads: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, H, T] the positions of tokens taken in from the start, and [B] how many they are."""
    places = torch.arange(count, device=device).expand(batch, heads, -1)
    return places, torch.full((batch,), count, dtype=torch.long, device=device)


@lru_cache(maxsize=64)
def equal(batch: int, heads: int, slots: int, device: torch.device) -> Tensor:
    """[B, H] how many entries heads hold that hold one in each slot."""
    return torch.full((batch, heads), slots, dtype=torch.long, device=device)
