"""Numbers in few bits: how groups are coded and packed, and what that takes; knows neither entries nor policies.

Shapes: S slots, N rows of groups, C groups in a row.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..entries import ELEMENT_BYTES, Count, Holding

MOST_BITS = 4
ABOUT = 2  # numbers that say what a group's codes stand for: its scale and its least number


class Form(NamedTuple):
    """How much is stored in codes, and in how many bits."""

    bits: int
    residual: int  # how many of the newest values stay in full precision
    unit: int  # keys are coded once this many have come together; 0: never


class Layout(NamedTuple):
    """How one head's entries fall into groups."""

    group: int  # tokens, in a key's channel
    key_size: int
    value_group: int  # channels, in a token's value
    value_size: int

    @classmethod
    def of(cls, group: int, key_size: int, value_size: int) -> Layout:
        """Values take the largest groups, up to `group`, that divide their size."""
        divisor = max(n for n in range(1, min(group, value_size) + 1) if value_size % n == 0)
        return cls(group, key_size, divisor, value_size)

    def holding(self, bits: int, keys: Count, key_groups: Count, values: Count, coded_values: Count) -> Holding[Count]:
        """Return what is held by `keys` and `values` in full precision, groups of coded keys, and coded values."""
        of_keys = key_groups * self.key_size
        of_values = coded_values * (self.value_size // self.value_group)
        return Holding(
            entries=values + coded_values,
            numbers=keys * self.key_size + values * self.value_size,
            codes=of_keys * code_bytes(self.group, bits) + of_values * code_bytes(self.value_group, bits),
            scales=(of_keys + of_values) * ABOUT,
        )

    def of_keys(self, keys: Tensor) -> Tensor:
        """Part keys [B, H, N x group, D] into groups of tokens, [B, H, N, D, group]."""
        return keys.unflatten(2, (keys.shape[2] // self.group, self.group)).transpose(3, 4)

    def of_values(self, values: Tensor) -> Tensor:
        """Part values [B, H, N, D] into groups of channels, [B, H, N, C, value_group]."""
        return values.unflatten(3, (self.value_size // self.value_group, self.value_group))


def code_bytes(size: int, bits: int) -> int:
    """Return the bytes that the codes of a group of `size` numbers take."""
    return -(-size * bits // 8)


def group_bytes(size: int, bits: int) -> int:
    """Return the bytes of a group of `size` numbers: its codes, its scale and its least number."""
    return code_bytes(size, bits) + ABOUT * ELEMENT_BYTES


class Coded(NamedTuple):
    """Groups of numbers, each number a code: so many steps of its group's scale above the group's least number."""

    codes: Tensor  # [B, H, N, C, bytes of a group] uint8, 8 / bits codes to a byte
    scale: Tensor  # [B, H, N, C]
    least: Tensor  # [B, H, N, C]

    @property
    def length(self) -> int:
        """N, the rows of groups."""
        return self.scale.shape[2]

    def since(self, first: int) -> Coded:
        """Drop the rows of groups before `first`."""
        return Coded(*(since(tensor, first) for tensor in self))

    def then(self, groups: Tensor, bits: int) -> Coded:
        """Code `groups` [B, H, N, C, size] and add them behind."""
        if not groups.shape[2]:
            return self
        return Coded(*(torch.cat(pair, 2) for pair in zip(self, encode(groups, bits), strict=True)))


def encode(groups: Tensor, bits: int) -> Coded:
    """Code `groups` [B, H, N, C, size] in their own dtype; a group of equal numbers is restored as it was."""
    least, most = groups.amin(-1), groups.amax(-1)
    scale = (most - least) / (2**bits - 1)
    steps = (groups - least[..., None]) / scale.masked_fill(scale == 0, 1)[..., None]
    return Coded(pack(steps.clamp(0, 2**bits - 1).round().to(torch.uint8), bits), scale, least)


def decode(coded: Coded, bits: int, size: int) -> Tensor:
    """Return the numbers that the codes stand for, [B, H, N, C, size]."""
    codes = unpack(coded.codes, bits)[..., :size]
    return codes.to(coded.scale.dtype) * coded.scale[..., None] + coded.least[..., None]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Put codes [..., size] into bytes: the first of a byte in its lowest bits, zeros where codes run out."""
    codes = pad(codes, (0, -codes.shape[-1] % (8 // bits)))
    codes = codes.unflatten(-1, (codes.shape[-1] * bits // 8, 8 // bits))
    return (codes << shifts(bits, codes.device)).sum(-1, dtype=torch.uint8)


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Take codes out of bytes, the filling zeros among them."""
    return ((codes[..., None] >> shifts(bits, codes.device)) & (2**bits - 1)).flatten(-2)


@cache
def shifts(bits: int, device: torch.device) -> Tensor:
    """Return where a byte's codes lie in it; kept, since every decoded token asks for it in every layer."""
    return torch.arange(0, 8, bits, device=device, dtype=torch.uint8)


def since(tensor: Tensor, first: int) -> Tensor:
    """Return `tensor` [B, H, N, ...] from `first` on, in memory of its own: what is dropped must be freed."""
    return tensor[:, :, first:].clone() if first else tensor
