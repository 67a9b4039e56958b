"""How the keys and values of one layer are stored; knows neither positions nor policies.

Shapes: B sequences, H key/value heads, S slots, T new tokens, W slots kept, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

MANY = 1 << 13  # numbers: fewer are gathered sooner one by one
ELEMENT_BYTES = 2  # what an element is counted as, whatever dtype the run uses
Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True)
class Holding(Generic[Count]):
    """What is held of sequences: tensors [B] where caches are counted, ints where it is reckoned without any."""

    entries: Count
    numbers: Count  # of keys and values, in full precision
    codes: Count = 0  # type: ignore[assignment]  # bytes of keys and values in fewer bits
    scales: Count = 0  # type: ignore[assignment]  # numbers that say what codes stand for
    noted: Count = 0  # type: ignore[assignment]  # numbers that a policy wrote about entries and sequences

    def stored(self, element: int = ELEMENT_BYTES) -> Count:
        """Return the bytes of keys and values in their stored form, at `element` bytes a number."""
        return self.numbers * element + self.codes

    def about(self, element: int = ELEMENT_BYTES) -> Count:
        """Return the bytes of what is held beside them: scales, marks and notes."""
        return (self.scales + self.noted) * element

    def bytes(self, element: int = ELEMENT_BYTES) -> Count:
        """Return all bytes."""
        return self.stored(element) + self.about(element)


class Entries(ABC):
    """Stored keys and values. A value: every change returns a new one and leaves the old one as it was."""

    @abstractmethod
    def dense(self) -> tuple[Tensor, Tensor]:
        """Return keys and values as attention needs them, [B, H, S, D] each."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Elements of one entry's key and value together."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What attention gets keys and values in."""

    away: ClassVar[bool] = False  # whether what attention needs must be brought from elsewhere

    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values in the last `count` slots, [B, H, count, D] each."""
        keys, values = self.dense()
        return keys[:, :, keys.shape[2] - count :], values[:, :, values.shape[2] - count :]

    def chosen(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values in the slots `order`, [B, H, W, D] each."""
        keys, values = self.dense()
        return gather_slots(keys, order), gather_slots(values, order)

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> Entries:
        """Add T entries after the last slot, [B, H, T, D] each."""

    @abstractmethod
    def take(self, order: Tensor) -> Entries:
        """Keep the slots `order` [B, H, W], in that order."""

    @abstractmethod
    def rows(self, index: Tensor | slice) -> Entries:
        """Return the sequences at `index`."""

    @abstractmethod
    def stack(self, others: Sequence[Entries], lead: Sequence[int]) -> Entries:
        """Put `others` (this one among them) side by side, each with `lead` unused slots in front."""

    @abstractmethod
    def holding(self, counts: Tensor) -> Holding[Tensor]:
        """Return what `counts` [B, H] entries take in this form, nothing being noted about them."""

    def cost(self, counts: Tensor) -> Tensor:
        """Return the bytes [B] that `counts` [B, H] entries take in this form, 2 bytes an element."""
        return self.holding(counts).bytes()


@dataclass
class Arena:
    """Room for keys and values [B, H, capacity, D]; slots under a view's length never change."""

    keys: Tensor
    values: Tensor
    used: int
    twin: Entries | None = field(default=None, repr=False)  # the same entries in host memory, once some cell has them there


@dataclass(frozen=True, eq=False)
class Plain(Entries):
    """Keys and values as they came: a view of the first `length` slots of an append-only arena.

    The view that reaches the arena's end may write on behind it; any other view that grows moves to an arena of its own.
    """

    arena: Arena
    length: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Plain:
        """Hold `keys` and `values` [B, H, S, D] without copying them."""
        return cls(Arena(keys, values, keys.shape[2]), keys.shape[2])

    def dense(self) -> tuple[Tensor, Tensor]:
        return self.arena.keys[:, :, : self.length], self.arena.values[:, :, : self.length]

    @property
    def size(self) -> int:
        return self.arena.keys.shape[3] + self.arena.values.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.arena.keys.dtype

    def append(self, keys: Tensor, values: Tensor) -> Plain:
        if not self.arena.keys.shape[2]:
            return Plain.of(keys, values)
        arena, end = self.arena, self.length + keys.shape[2]
        if arena.used != self.length or arena.keys.shape[2] < end:
            arena = self.moved(end + end // 4 + 16)
        arena.keys[:, :, self.length : end].copy_(keys, non_blocking=True)
        arena.values[:, :, self.length : end].copy_(values, non_blocking=True)
        arena.used = end
        return Plain(arena, end)

    def moved(self, capacity: int) -> Arena:
        """Copy the view into a new arena with room for `capacity` slots."""
        old_keys, old_values = self.dense()
        pinned = old_keys.is_pinned()
        keys = old_keys.new_empty((*old_keys.shape[:2], capacity, old_keys.shape[3]), pin_memory=pinned)
        values = old_values.new_empty((*old_values.shape[:2], capacity, old_values.shape[3]), pin_memory=pinned)
        keys[:, :, : self.length], values[:, :, : self.length] = old_keys, old_values
        return Arena(keys, values, self.length)

    def take(self, order: Tensor) -> Plain:
        keys, values = self.dense()
        return Plain.of(gather_slots(keys, order), gather_slots(values, order))

    def rows(self, index: Tensor | slice) -> Plain:
        keys, values = self.dense()
        return Plain.of(keys[index], values[index]).sealed()

    def sealed(self) -> Plain:
        """Forbid writing behind this view: its memory may belong to another arena."""
        return Plain(Arena(self.arena.keys, self.arena.values, -1), self.length)

    def stack(self, others: Sequence[Entries], lead: Sequence[int]) -> Plain:
        pairs = [other.dense() for other in others]
        keys, values = (
            torch.cat([pad(pair[side], (0, 0, short, 0)) for pair, short in zip(pairs, lead, strict=True)]) for side in (0, 1)
        )
        return Plain.of(keys, values)

    def holding(self, counts: Tensor) -> Holding[Tensor]:
        entries = counts.sum(1)
        return Holding(entries, entries * self.size)


def gather_slots(tensor: Tensor, order: Tensor) -> Tensor:
    """Pick slots `order` [B, H, W] from `tensor` [B, H, S, ...]."""
    if tensor.dim() == 4 and order.numel() * tensor.shape[3] >= MANY and in_rows(tensor):
        return gather_rows(tensor, order)
    index = order.reshape(*order.shape, *[1] * (tensor.dim() - 3)).expand(*order.shape, *tensor.shape[3:])
    return tensor.gather(2, index)


def in_rows(tensor: Tensor) -> bool:
    """Whether each entry of `tensor` [B, H, S, D] lies in one piece, and all at multiples of D."""
    *outer, last = tensor.stride()
    return last == 1 and not any(step % tensor.shape[3] for step in outer)


def gather_rows(tensor: Tensor, order: Tensor) -> Tensor:
    """Pick slots `order` [B, H, W] from `tensor` [B, H, S, D], an entry in one piece: several times faster than number by number."""
    (batch, heads, slots, size), steps = tensor.shape, [step // tensor.shape[3] for step in tensor.stride()[:3]]
    count = 1 + sum((extent - 1) * step for extent, step in zip((batch, heads, slots), steps, strict=True))
    start = torch.arange(batch, device=order.device)[:, None] * steps[0] + torch.arange(heads, device=order.device) * steps[1]
    places = start[:, :, None] + order * steps[2]
    return tensor.as_strided((count, size), (size, 1)).index_select(0, places.flatten()).view(*order.shape, size)
