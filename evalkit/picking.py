"""Attention to the entries that a query reads alone, brought together, in place of all under a mask; knows no single policy.

Shapes: B sequences, H key/value heads, G queries per head, T tokens, S slots, W slots that are read, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import LayerCache
from .entries import gather_slots
from .masks import counts, listed, some
from .policy import Policy

LONG, FEW = 512, 2  # slots from which entries are picked on the device, where they are at most one in FEW: below, a mask is as fast


@dataclass(frozen=True)
class Picked:
    """The entries that a query group's queries read, of what is held: attention to them alone is attention to all under a mask."""

    order: Tensor  # [B, H, W] their slots
    used: Tensor | None  # [B, H, W] which of these are meant; None: all

    def seen(self, allowed: Tensor, slots: int) -> Tensor:
        """[B, H, 1, T, W + T] what `allowed` [B, H or 1, 1, T, S + T] says of these and of the T tokens behind."""
        held, own = allowed[..., :slots], allowed[..., slots:].expand(-1, self.order.shape[1], -1, -1, -1)
        places = self.order[:, :, None, None].expand(-1, -1, 1, allowed.shape[3], -1)
        held = held.expand(-1, self.order.shape[1], -1, -1, -1).gather(4, places)
        return torch.cat([held if self.used is None else held & self.used[:, :, None, None], own], dim=-1)

    def visible(self) -> Tensor | None:
        """[B, H, 1, 1, W + 1] what the newest token sees of these and of itself; None: all."""
        return None if self.used is None else torch.nn.functional.pad(self.used, (0, 1), value=True)[:, :, None, None]

    def spread(self, weights: Tensor, slots: int) -> Tensor:
        """[B, H, G, 1, S + 1] the weights [B, H, G, 1, W + 1] of these and of the newest token, among those of all slots."""
        places = self.order[:, :, None, None].expand_as(weights[..., :-1])
        everything = weights.new_zeros(*weights.shape[:-1], slots + 1).scatter_add(-1, places, weights[..., :-1])
        everything[..., -1:] = weights[..., -1:]
        return everything


def picked(policy: Policy, cache: LayerCache, read: Tensor) -> Picked | None:
    """Pick what is read, [B, H, 1 or G, S]; None where attention to all under a mask is as good, or what is read hangs on the query.

    What lives in host memory is picked in any case.
    """
    if read.shape[2] > 1 or policy.overrides("place") or not (cache.entries.away or cache.slots >= LONG):
        return None
    order, used = listed(read[:, :, 0].expand(cache.positions.shape))
    return Picked(order, used) if cache.entries.away or FEW * order.shape[2] <= cache.slots else None


def narrowed(keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bring together the slots of keys and values [B, H, S, D] that any of T tokens sees, where they are few.

    `seen` [B, H or 1, 1 or G, T, S] comes back for them alone.
    """
    slots = keys.shape[2]
    if seen.shape[2] > 1 or slots < LONG:
        return keys, values, seen
    read = some(seen, 3)[:, :, 0]
    if FEW * int(counts(read, -1).max()) > slots:
        return keys, values, seen
    order, used = listed(read.expand(keys.shape[:3]))
    few = Picked(order, used).seen(seen, slots)
    return gather_slots(keys, order), gather_slots(values, order), few


@dataclass(frozen=True)
class Foreseen:
    """What tokens are to read in a layer that is yet to begin."""

    cache: LayerCache
    few: Picked
    held: tuple[Tensor, Tensor]  # brought to the device, [B, H, W, D] each


def joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Put keys and values [B, H, ?, D] behind others."""
    keys, values = (torch.cat([first, then], dim=2) for first, then in zip(one, other, strict=True))
    return keys, values
