"""Keys and values in bit-packed codes, the newest of them in full precision; knows neither positions nor budgets.

Keys are coded by channel, in groups of tokens; values by token, in groups of channels. Shapes: B sequences, H key/value heads,
S slots, T new tokens, D head size, N rows of groups, C groups in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor

from ..entries import Entries, Holding, Plain, gather_slots
from ._codes import MOST_BITS, Coded, Form, Layout, decode, encode, since


@dataclass(frozen=True, eq=False)
class Part:
    """Sequences that are stored alike: old entries in codes, then the newest in full precision."""

    layout: Layout
    form: Form
    coded_keys: Coded  # N groups of tokens, C = D channels
    coded_values: Coded  # N tokens, C groups of channels
    keys: Tensor  # [B, H, ?, D] in full precision
    values: Tensor  # [B, H, ?, D] in full precision
    start: int = 0  # tokens that came before the first coded key
    passed: int = 0  # coded keys in front that are no slots any more: their group is dropped as a whole

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, group: int) -> Part:
        """Hold keys and values [B, H, S, D] as they are."""
        layout = Layout.of(group, keys.shape[3], values.shape[3])
        coded_keys = encode(layout.of_keys(keys[:, :, :0]), MOST_BITS)
        coded_values = encode(layout.of_values(values[:, :, :0]), MOST_BITS)
        return cls(layout, Form(MOST_BITS, keys.shape[2], 0), coded_keys, coded_values, keys, values)

    @property
    def slots(self) -> int:
        """S, the entries held."""
        return self.coded_values.length + self.values.shape[2]

    @property
    def length(self) -> int:
        """The tokens taken in, those that were dropped since among them."""
        return self.start + self.coded_keys.length * self.layout.group + self.keys.shape[2]

    @property
    def kind(self) -> Hashable:
        """What agrees for sequences that can be held in one part."""
        return self.form, self.start, self.passed, self.length, self.slots, self.keys.shape[2], self.values.shape[2]

    def dense(self) -> tuple[Tensor, Tensor]:
        """Restore keys and values, [B, H, S, D] each."""
        bits, layout, keys, values = self.form.bits, self.layout, self.keys, self.values
        if self.coded_keys.length:
            old = decode(self.coded_keys, bits, layout.group).transpose(3, 4).flatten(2, 3)
            keys = torch.cat([old[:, :, self.passed :], keys], 2)
        if self.coded_values.length:
            values = torch.cat([decode(self.coded_values, bits, layout.value_group).flatten(3), values], 2)
        return keys, values

    def append(self, keys: Tensor, values: Tensor) -> Part:
        """Add T entries in full precision, [B, H, T, D] each."""
        return replace(self, keys=torch.cat([self.keys, keys], 2), values=torch.cat([self.values, values], 2))

    def settled(self, form: Form) -> Part:
        """Code what `form` does not leave in full precision; what is coded stays so."""
        layout, part = self.layout, self.recoded(form)
        before = self.length - self.keys.shape[2]
        keys = max(0, self.length // form.unit * form.unit - before) if form.unit else 0
        values = max(0, self.values.shape[2] - form.residual)
        return replace(
            part,
            coded_keys=part.coded_keys.then(layout.of_keys(self.keys[:, :, :keys]), form.bits),
            coded_values=part.coded_values.then(layout.of_values(self.values[:, :, :values]), form.bits),
            keys=since(self.keys, keys),
            values=since(self.values, values),
        )

    def recoded(self, form: Form) -> Part:
        """Put what is coded into codes of `form`'s bits."""
        bits, layout = self.form.bits, self.layout
        if form.bits == bits:
            return replace(self, form=form)
        coded_keys = encode(decode(self.coded_keys, bits, layout.group), form.bits)
        coded_values = encode(decode(self.coded_values, bits, layout.value_group), form.bits)
        return replace(self, form=form, coded_keys=coded_keys, coded_values=coded_values)

    def newest(self, count: int) -> Part:
        """Drop all but the newest `count` slots; a group of keys goes once none of its tokens is a slot."""
        drop, group = max(0, self.slots - count), self.layout.group
        groups = min((self.passed + drop) // group, self.coded_keys.length)
        rest, values = self.passed + drop - groups * group, min(drop, self.coded_values.length)
        cut = rest if groups == self.coded_keys.length else 0
        return replace(
            self,
            coded_keys=self.coded_keys.since(groups),
            coded_values=self.coded_values.since(values),
            keys=since(self.keys, cut),
            values=since(self.values, drop - values),
            start=self.start + groups * group + cut,
            passed=rest - cut,
        )

    def holding(self, counts: Tensor) -> Holding[Tensor]:
        """Return what each head's newest `counts` [B, H] slots take, [B]."""
        keys, values = counts.clamp(max=self.keys.shape[2]), counts.clamp(max=self.values.shape[2])
        groups = (counts - keys + self.layout.group - 1) // self.layout.group
        return self.layout.holding(self.form.bits, *(each.sum(1) for each in (keys, groups, values, counts - values)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.coded_keys, *self.coded_values, self.keys, self.values)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Part:
        """Return a part of the same kind with other sequences' tensors."""
        return replace(self, coded_keys=Coded(*tensors[:3]), coded_values=Coded(*tensors[3:6]), keys=tensors[6], values=tensors[7])

    def rows(self, index: Tensor | slice | list[int]) -> Part:
        """Return the sequences at `index`."""
        return self.with_tensors([tensor[index] for tensor in self.tensors])


def joined(parts: Sequence[Part]) -> Part:
    """Hold the sequences of parts of one kind in one."""
    if len(parts) == 1:
        return parts[0]
    return parts[0].with_tensors([torch.cat(tensors) for tensors in zip(*(part.tensors for part in parts), strict=True)])


@dataclass(frozen=True, eq=False)
class Packed(Entries):
    """Sequences in packed storage side by side; those that are stored alike make a part. A single part holds them in order."""

    parts: tuple[Part, ...]
    places: tuple[Sequence[int], ...]  # which sequences each part holds
    slots: int  # of the widest part; narrower ones have unused slots in front

    @classmethod
    def of(cls, entries: Entries, group: int) -> Packed:
        """Hold `entries` in full precision for now, unless they are packed already."""
        if isinstance(entries, Packed):
            return entries
        part = Part.of(*entries.dense(), group)
        return cls((part,), (range(len(part.keys)),), part.slots)

    @property
    def count(self) -> int:
        """B, the sequences."""
        return sum(map(len, self.places))

    def settled(self, choose: Callable[[Part, int], Form]) -> Packed:
        """Store each sequence in the form chosen for it, by its part and its place among the sequences."""
        parts: list[Part] = []
        places: list[Sequence[int]] = []
        for part, here in zip(self.parts, self.places, strict=True):
            forms: dict[Form, list[int]] = {}
            for row, place in enumerate(here):
                forms.setdefault(choose(part, place), []).append(row)
            parts += [(part if len(forms) == 1 else part.rows(rows)).settled(form) for form, rows in forms.items()]
            places += [[here[row] for row in rows] for rows in forms.values()]
        return Packed(tuple(parts), tuple(places), self.slots)

    def shared(self, tensor: Tensor) -> list[Tensor]:
        """Hand each part its sequences' rows of `tensor` [B, ...]."""
        return [tensor] if len(self.parts) == 1 else [tensor[list(here)] for here in self.places]

    @property
    def size(self) -> int:
        return self.parts[0].keys.shape[3] + self.parts[0].values.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].keys.dtype

    def dense(self) -> tuple[Tensor, Tensor]:
        pairs = [part.dense() for part in self.parts]
        if len(pairs) == 1 and self.parts[0].slots == self.slots:
            return pairs[0]
        return self.beside([keys for keys, _ in pairs]), self.beside([values for _, values in pairs])

    def beside(self, tensors: Sequence[Tensor]) -> Tensor:
        """Put each part's [b, H, s, D] where its sequences are among all, [B, H, S, D]."""
        whole = tensors[0].new_zeros(self.count, tensors[0].shape[1], self.slots, tensors[0].shape[3])
        for tensor, here in zip(tensors, self.places, strict=True):
            whole[list(here), :, self.slots - tensor.shape[2] :] = tensor
        return whole

    def append(self, keys: Tensor, values: Tensor) -> Packed:
        new = zip(self.parts, self.shared(keys), self.shared(values), strict=True)
        return replace(self, parts=tuple(part.append(*pair) for part, *pair in new), slots=self.slots + keys.shape[2])

    def take(self, order: Tensor) -> Entries:
        """Keep the slots `order`. The newest of all heads alike, as a passing window leaves them, stay packed.

        Others leave holes in the groups: they are restored and held in full precision.
        """
        newest = torch.arange(self.slots - order.shape[2], self.slots, device=order.device)
        if bool((order == newest).all()):
            return replace(self, parts=tuple(part.newest(len(newest)) for part in self.parts), slots=len(newest))
        keys, values = self.dense()
        return Plain.of(gather_slots(keys, order), gather_slots(values, order))

    def rows(self, index: Tensor | slice) -> Packed:
        if len(self.parts) == 1:
            part = self.parts[0].rows(index)
            return Packed((part,), (range(len(part.keys)),), self.slots)
        numbers = torch.arange(self.count)[index if isinstance(index, slice) else index.cpu()].tolist()
        parts: list[Part] = []
        places: list[Sequence[int]] = []
        for part, here in zip(self.parts, self.places, strict=True):
            found = [place for place, number in enumerate(numbers) if number in here]
            if found:
                parts.append(part.rows([here.index(numbers[place]) for place in found]))
                places.append(found)
        return Packed(tuple(parts), tuple(places), self.slots)

    def stack(self, others: Sequence[Entries], lead: Sequence[int]) -> Packed:
        kinds: dict[Hashable, tuple[list[Part], list[int]]] = {}
        first = 0
        several = cast(Sequence[Packed], others)
        for other in several:
            for part, here in zip(other.parts, other.places, strict=True):
                parts, places = kinds.setdefault(part.kind, ([], []))
                parts.append(part)
                places += [first + place for place in here]
            first += other.count
        together = tuple(joined(parts) for parts, _ in kinds.values())
        return Packed(together, tuple(places for _, places in kinds.values()), several[0].slots + lead[0])

    def holding(self, counts: Tensor) -> Holding[Tensor]:
        total = Holding(*(counts.new_zeros(len(counts)) for _ in fields(Holding)))
        for part, here, mine in zip(self.parts, self.places, self.shared(counts), strict=True):
            for whole, own in zip(vars(total).values(), vars(part.holding(mine)).values(), strict=True):
                whole[list(here)] = own
        return total
