"""What policies write about entries and sequences, and how that is put side by side; knows no cache and no policy.

Shapes: B sequences, H key/value heads, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

Marks = Mapping[str, Tensor]
NOTHING: Marks = MappingProxyType({})


def elements(note: Tensor) -> Tensor | int:
    """[B] a note's elements; rows of zeros behind, which pad shorter sequences, are not counted."""
    return note[0].numel() if note.dim() < 3 else note.ne(0).any(-1).flatten(1).sum(1) * note.shape[-1]


def stack_marks(marks: Sequence[Marks], slots: Sequence[Tensor], lead: Sequence[int]) -> Marks:
    """Join marks about `slots` [B, H, S], with `lead` unused ones in front; a cache that has seen nothing has none yet."""
    like = {name: mark for own in marks for name, mark in own.items()}
    joined = {}
    for name, example in like.items():
        parts = []
        for own, places, short in zip(marks, slots, lead, strict=True):
            mark = own.get(name)
            mark = example.new_zeros(*places.shape, *example.shape[3:]) if mark is None else mark
            parts.append(pad(mark, (0, 0) * (mark.dim() - 3) + (short, 0)))
        joined[name] = torch.cat(parts)
    return joined


def stack_notes(notes: Sequence[Marks], rows: Sequence[int]) -> Marks:
    """Join notes about so many sequences each, padding with zeros behind where sizes differ."""
    like = {name: note for own in notes for name, note in own.items()}
    joined = {}
    for name, example in like.items():
        parts = [
            own.get(name, example.new_zeros(count, *[0] * (example.dim() - 1))) for own, count in zip(notes, rows, strict=True)
        ]
        sizes = [max(part.shape[axis] for part in parts) for axis in range(1, example.dim())]
        joined[name] = torch.cat([pad(part, _behind(part, sizes)) for part in parts])
    return joined


def _behind(part: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return `torch.nn.functional.pad`'s argument that grows axes 1... of `part` to `sizes` at their ends."""
    return [amount for axis in range(len(sizes), 0, -1) for amount in (0, sizes[axis - 1] - part.shape[axis])]
