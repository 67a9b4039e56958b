"""One layer's cache as a value: what is held, where each entry came from, what was noted about it; knows no policy and no model.

Shapes used everywhere: B sequences side by side, H key/value heads, G query heads per key/value head (the query group), T new
tokens, S slots, D head size. Acting on a cache returns a new one, so a fork is a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from .entries import Entries, Holding, Plain, gather_slots
from .layer import Layer, exact
from .marks import NOTHING, Marks, elements, stack_marks, stack_notes
from .masks import causal, counted, equal, hidden, highest, pieces, summed

EMPTY = -1  # the position of a slot that holds nothing
SLACK = 8  # forgotten slots tolerated beyond a quarter before decoding compacts them away


@dataclass(frozen=True, eq=False)
class LayerCache:
    """The entries one layer holds for B sequences, oldest first."""

    layer: Layer
    entries: Entries
    positions: Tensor  # [B, H, S] where each entry came from; EMPTY where a head keeps fewer
    seen: Tensor  # [B] tokens taken in so far
    allowance: Tensor | None = None  # [B] entries the budget grants each head; None grants all
    marks: Marks = field(
        default_factory=lambda: NOTHING
    )  # name -> [B, H, S, ...] what a policy wrote about entries; travels with them
    notes: Marks = field(default_factory=lambda: NOTHING)  # name -> [B, ...] what a policy wrote about the sequences
    prepared: Marks = field(default_factory=lambda: NOTHING)  # what the policy's `prepare` learned about this layer
    guess: Tensor | None = None  # [B, H, G, T, D] the queries expected from the layer before
    choices: Tensor | None = None  # [B, H or 1, 1, T, S] what each of several queries that read at once may choose from
    fresh: int = 0  # how many of the newest slots hold tokens just taken in
    decoding: bool = False  # the fresh token was decoded (or streamed), not part of a block
    complete: bool = True  # the newest token ends a prompt or a message: static policies act only now
    gaps: bool = False  # whether heads may differ in what their queries see
    roomy: int = 0  # while decoding, forgotten slots are compacted away once S exceeds this
    attended: tuple[Tensor, Callable[[], Tensor]] | None = field(
        default=None, repr=False
    )  # the last query; its weights, when asked for
    drawn: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # the last queries and what each slot `received` of them

    @classmethod
    def empty(cls, layer: Layer, like: Tensor, rows: int) -> LayerCache:
        """Return a cache that has seen nothing; `like` [?, H, ?, D] gives heads, size, dtype and device."""
        nothing = like.new_empty(rows, like.shape[1], 0, like.shape[3])
        places = torch.empty(nothing.shape[:3], dtype=torch.long, device=like.device)
        return cls(layer, Plain.of(nothing, nothing), places, torch.zeros(rows, dtype=torch.long, device=like.device))

    @classmethod
    def begun(cls, layer: Layer, keys: Tensor, values: Tensor, *, complete: bool) -> LayerCache:
        """Return what `empty(...).append(keys, values)` would: the beginnings of B sequences, [B, H, T, D] each."""
        places, seen = counted(*keys.shape[:3], keys.device)
        return cls(layer, Plain.of(keys, values), places, seen, fresh=keys.shape[2], complete=complete)

    @property
    def slots(self) -> int:
        """S, the slots of the widest head."""
        return self.positions.shape[2]

    @cached_property
    def filled(self) -> Tensor:
        """[B, H, S] whether a slot holds an entry that the sliding window has not passed."""
        if self.layer.window is None:
            return self.positions != EMPTY
        return self.positions >= (self.seen - self.layer.window).clamp(min=0)[:, None, None]

    @property
    def counts(self) -> Tensor:
        """[B, H] entries held."""
        return equal(*self.positions.shape, self.seen.device) if self.uniform else self.filled.sum(-1)

    @property
    def uniform(self) -> bool:
        """Whether every slot of every head is live and in reach of all queries to come, as far as is known without looking."""
        return not self.gaps and self.layer.window is None

    @property
    def tokens(self) -> Tensor:
        """[B] tokens the layer could hold: those seen, or the sliding window."""
        return self.seen if self.layer.window is None else self.seen.clamp(max=self.layer.window)

    @property
    def marked(self) -> int:
        """How many numbers are written about each entry."""
        return sum(mark.shape[3:].numel() for mark in self.marks.values())

    def holding(self) -> Holding[Tensor]:
        """What is held of each sequence: entries in their stored form, marks and notes."""
        held = self.entries.holding(self.counts)
        once = sum(elements(note) for note in self.notes.values())
        return replace(held, noted=held.entries * self.marked + once)

    def cost(self) -> Tensor:
        """[B] bytes held, at 2 bytes an element."""
        return self.holding().bytes()

    # Attention, as the layer pays it

    def reach(self, now: Tensor) -> Tensor:
        """[B, H or 1, 1, T, S] which slots queries at positions `now` [B, T] may attend to."""
        places = self.positions if self.gaps else self.positions[:, :1]
        there, now = places[:, :, None, None], now[:, None, None, :, None]
        allowed = (there != EMPTY) & (there <= now)
        return allowed if self.layer.window is None else allowed & (now - there < self.layer.window)

    def open(self) -> Tensor:
        """[B, H or 1, 1, T, S] which slots the queries that are about to read may choose from; one query, at `seen`, unless said."""
        return self.reach(self.seen[:, None]) if self.choices is None else self.choices

    def visible(self, count: int, start: int = 0, stop: int | None = None) -> Tensor:
        """[B, H or 1, 1, T, S] which slots queries start to stop of the newest `count` tokens may attend to."""
        stop = count if stop is None else stop
        if self.uniform:
            make = causal if stop - start == count else causal.__wrapped__  # blocks of a long prompt do not come up again
            return make(stop - start, self.slots - count + start, self.slots, self.seen.device)
        return self.reach(self.seen[:, None] - count + torch.arange(start, stop, device=self.seen.device))

    def seen_by(self, query: Tensor) -> Tensor | None:
        """What the newest queries may attend to, in the form that is cheapest for `Layer.attention`."""
        group, count = query.shape[2:4]
        if not self.uniform:
            return self.visible(count)
        return None if count == 1 else hidden(count, self.slots - count, self.slots, group, exact(query[:0]).dtype, query.device)

    def blocks(self, count: int, group: int) -> Iterator[tuple[int, int]]:
        """Cut the newest `count` queries so that no block makes too many weights at once."""
        return pieces(count, self.positions.numel() * group)

    def weights(self, query: Tensor) -> Tensor:
        """Return how much each of the newest T queries attends to each slot, [B, H, G, T, S]."""
        if self.attended is not None and self.attended[0] is query:
            return self.attended[1]()
        return self.layer.attention(query, self.entries.dense()[0], self.seen_by(query))

    def received(self, query: Tensor) -> Tensor:
        """Return the attention each slot received, summed over the newest T queries, [B, H, G, S]."""
        if self.drawn is not None and self.drawn[0] is query:
            return self.drawn[1]
        if self.attended is not None and self.attended[0] is query:
            return self.attended[1]().sum(3)
        return summed(weights.sum(3) for weights in self.weighed(query))

    def weighed(self, query: Tensor) -> Iterator[Tensor]:
        """Yield `weights` of the newest T queries in blocks of t, [B, H, G, t, R] of the first R slots: memory is linear in S."""
        count, keys = query.shape[3], self.entries.dense()[0]
        blocks = list(self.blocks(count, query.shape[2]))
        if len(blocks) == 1:
            yield self.layer.attention(query, keys, self.seen_by(query))
            return
        for start, stop in blocks:
            reach = self.slots - count + stop if self.uniform else self.slots  # what lies behind is the block's future
            visible = self.visible(count, start, stop)[..., :reach]
            yield self.layer.attention(query[:, :, :, start:stop], keys[:, :, :reach], visible)

    # What changes

    def append(self, keys: Tensor, values: Tensor, *, decoding: bool = False, complete: bool = True) -> LayerCache:
        """Take in T tokens a sequence, [B, H, T, D] each."""
        count = keys.shape[2]
        now = self.seen[:, None] + torch.arange(count, device=keys.device)
        places = now[:, None].expand(-1, keys.shape[1], -1)
        return replace(
            self,
            entries=self.entries.append(keys, values),
            positions=torch.cat([self.positions, places], dim=2) if self.slots else places,
            seen=self.seen + count,
            marks={name: pad(mark, (0, 0) * (mark.dim() - 3) + (0, count)) for name, mark in self.marks.items()},
            fresh=count,
            decoding=decoding,
            complete=complete,
            attended=None,
        )

    def mark(self, name: str, value: Tensor) -> LayerCache:
        """Write about entries: `value` [B, H, S, ...] travels with them; tokens to come start at zero."""
        return replace(self, marks={**self.marks, name: value})

    def note(self, name: str, value: Tensor) -> LayerCache:
        """Write about the sequences: `value` [B, ...]."""
        return replace(self, notes={**self.notes, name: value})

    def keep(self, wanted: Tensor) -> LayerCache:
        """Forget every slot outside `wanted` [B, H, S]; heads may keep different numbers."""
        wanted = wanted & self.filled
        if self.decoding and self.slots <= self.roomy:
            return replace(self, positions=self.positions.where(wanted, EMPTY), gaps=True)
        fewest, width = (int(count) for count in wanted.sum(-1).aminmax())
        if fewest == self.slots:
            return self
        order = wanted.byte().argsort(dim=-1, descending=True, stable=True)[..., :width]
        positions = self.positions.where(wanted, EMPTY).gather(2, order)
        return self.taken(order, positions, gaps=fewest < width or self.layer.window is not None)

    def keep_best(self, scores: Tensor, count: Tensor) -> LayerCache:
        """Forget all but the `count` [B] entries of each head with the highest scores [B, H, S]; ties go to the earlier slot."""
        least, most = (int(number) for number in count.aminmax())
        if self.gaps or self.layer.window is not None or self.decoding or least != most:
            return self.keep(highest(scores, count[:, None], self.filled))
        if most >= self.slots:
            return self
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :most].sort(dim=-1).values
        return self.taken(order, self.positions.gather(2, order), gaps=False)

    def taken(self, order: Tensor, positions: Tensor, *, gaps: bool) -> LayerCache:
        """Keep the slots `order` [B, H, W], from `positions`."""
        width = order.shape[2]
        return replace(
            self,
            entries=self.entries.take(order),
            positions=positions,
            marks={name: gather_slots(mark, order) for name, mark in self.marks.items()},
            gaps=gaps,
            roomy=width + width // 4 + SLACK,
            attended=None,
        )

    def expired(self) -> LayerCache:
        """Drop entries that the sliding window has passed, once they are many."""
        window = self.layer.window
        return self if window is None or self.slots <= window + window // 4 + SLACK else self.keep(self.filled)

    def remembering(self, earlier: LayerCache) -> LayerCache:
        """Take over the marks and notes of an `earlier` cache of the same entries; slots added since start at zero."""
        more = self.slots - earlier.slots
        marks = {name: pad(mark, (0, 0) * (mark.dim() - 3) + (0, more)) for name, mark in earlier.marks.items()}
        return replace(self, marks=marks, notes=earlier.notes)

    # Sequences side by side

    def rows(self, index: Tensor | slice) -> LayerCache:
        """Return the sequences at `index`."""
        return replace(
            self,
            entries=self.entries.rows(index),
            positions=self.positions[index],
            seen=self.seen[index],
            allowance=None if self.allowance is None else self.allowance[index],
            marks={name: mark[index] for name, mark in self.marks.items()},
            notes={name: note[index] for name, note in self.notes.items()},
            attended=None,
        )

    @staticmethod
    def stack(caches: Sequence[LayerCache]) -> LayerCache:
        """Put caches of one layer side by side; narrower ones get EMPTY slots in front, shorter notes zeros behind."""
        if len(caches) == 1:
            return caches[0]
        lead = [max(cache.slots for cache in caches) - cache.slots for cache in caches]
        allowances = [cache.allowance for cache in caches if cache.allowance is not None]
        return replace(
            caches[0],
            entries=caches[0].entries.stack([cache.entries for cache in caches], lead),
            positions=torch.cat([pad(cache.positions, (short, 0), value=EMPTY) for cache, short in zip(caches, lead, strict=True)]),
            seen=torch.cat([cache.seen for cache in caches]),
            allowance=torch.cat(allowances) if len(allowances) == len(caches) else None,
            marks=stack_marks([cache.marks for cache in caches], [cache.positions for cache in caches], lead),
            notes=stack_notes([cache.notes for cache in caches], [len(cache.seen) for cache in caches]),
            gaps=any(lead) or any(cache.gaps for cache in caches),
            roomy=max(cache.roomy for cache in caches),
            attended=None,
        )
