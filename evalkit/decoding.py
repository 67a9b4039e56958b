"""The jobs of decoded tokens: answers attending to what is held, all at once or one after another under the policy.

Knows no single policy. Shapes: B sequences of a job, H key/value heads, G queries per head, T tokens a sequence, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from . import kernels
from .cache import LayerCache
from .counters import Counters
from .masks import counts, pieces, some
from .memory import Cell, Grants, State
from .picking import Foreseen, Picked, joined, picked
from .tokens import Places, Tokens


@dataclass
class Gulp:
    """Answers that no token of another answer has a say in: trees of tokens that attend to what is held, all at once.

    Policies that leave decoded tokens alone score so, and those whose queries choose what they read each by itself.
    """

    index: Tensor  # [B, T] the row's tokens of each tree
    depth: Tensor  # [B, T] how many tokens of the answer come before
    above: Tensor  # [B, T, T] which tokens of the tree each one follows, itself included
    sources: Sequence[tuple[State, Tensor | slice | None]]  # what the trees go on from (None: all rows), B in all
    documents: Sequence[int]  # [B] their numbers in the tally
    cell: Cell  # one of those they are asked under, which differ in their budgets alone
    paths: Tensor  # [B, T] how many answers run through the token
    known: dict[object, Tensor] = field(default_factory=dict)  # what is the same in every layer where all caches are uniform

    def __post_init__(self) -> None:
        self.places = Places(self.index)

    def attend(self, tokens: Tokens, counters: Counters) -> None:
        """Attend from all tokens of all trees at once."""
        cache = gathered(self.sources, tokens.layer.index)
        mask = self.uniform(cache, "mask", self.mask)
        query, chosen, few = tokens.queries(self.places), None, None
        if self.cell.policy.overrides("read"):
            with counters.phase("policy"):
                chosen = self.chosen(cache, tokens, query, mask)
        allowed = mask if chosen is None else mask & chosen
        if chosen is not None:
            with counters.phase("policy"):
                few = picked(self.cell.policy, cache, some(allowed[..., : cache.slots], 3))
        with counters.phase("transfer" if cache.entries.away else "attention"):
            held = self.cell.entries(cache) if few is None else cache.entries.chosen(few.order)
        with counters.phase("attention"):
            keys, values = joined(held, tokens.entries(self.places))
            seen = allowed if few is None else few.seen(allowed, cache.slots)
            part = lambda start, stop: seen[:, :, :, start:stop]  # noqa: E731
            blocks = pieces(self.index.shape[1], query[:, :, :, 0, 0].numel() * seen.shape[-1])
            tokens.put(self.places, kernels.masked(tokens.layer, query, keys, values, part, blocks, tokens.kernel))
        if self.cell.tally is not None:
            count = self.totals if chosen is None else partial(self.totals, allowed=allowed)
            totals = self.uniform(cache, "totals", count) if chosen is None else count(cache)
            self.cell.count_read(self.documents, cache, *totals)

    def uniform(self, cache: LayerCache, what: str, make: Callable[[LayerCache], Tensor]) -> Tensor:
        """Return `make(cache)`, made once for all layers where it is the same in all."""
        if not cache.uniform:
            return make(cache)
        key = (what, cache.slots, cache.positions.shape[1], cache.seen.device)
        if key not in self.known:
            self.known[key] = make(cache)
        return self.known[key]

    def mask(self, cache: LayerCache) -> Tensor:
        """[B, H or 1, 1, T, S + T] what each token of a tree sees: what is held, then the tokens above it."""
        if cache.uniform:
            return torch.nn.functional.pad(self.above[:, None, None], (cache.slots, 0), value=True)
        window, now = cache.layer.window, cache.seen[:, None] + self.depth
        held, tree = cache.reach(now), self.above
        if window is not None:
            tree = tree & (now[:, :, None] - now[:, None] < window)
        return torch.cat([held, tree[:, None, None].expand(-1, held.shape[1], -1, -1, -1)], dim=-1)

    def chosen(self, cache: LayerCache, tokens: Tokens, query: Tensor, mask: Tensor) -> Tensor | None:
        """[B, H, 1 or G, T, S + T] what each token chooses to read, itself always among it; None for all."""
        policy = self.cell.policy
        grown = policy.observe(cache.append(*tokens.entries(self.places), decoding=True), query)
        own = torch.nn.functional.pad(torch.eye(query.shape[3], dtype=torch.bool, device=mask.device), (cache.slots, 0))
        read = policy.read(replace(grown, guess=tokens.guesses(self.places), choices=mask & ~own), query)
        return None if read is None else read | own

    def totals(self, cache: LayerCache, allowed: Tensor | None = None) -> Tensor:
        """[3, B] the entries that queries read (a query group's by their union) and could reach, and the queries, by answers."""
        heads, window = cache.positions.shape[1], cache.layer.window
        mask = self.mask(cache) if allowed is None else some(allowed, 2)[:, :, None]
        read = counts(mask, -1).sum((1, 2)) * (heads // mask.shape[1])
        reach = cache.seen[:, None] + self.depth + 1
        reach = (reach if window is None else reach.clamp(max=window)) * heads
        return torch.stack([read, reach, torch.ones_like(read)]).mul_(self.paths).sum(2)


def gathered(sources: Sequence[tuple[State, Tensor | slice | None]], layer: int) -> LayerCache:
    """Put side by side what a layer holds of the sequences that jobs go on from."""
    held = [(state.caches[layer], rows) for state, rows in sources]
    return LayerCache.stack([cache if rows is None else cache.rows(rows) for cache, rows in held])


@dataclass
class Wave:
    """Decoded or streamed tokens, one after another under the policy, of several sequences in step.

    Sequences of unequal length end together: the longest starts first. So their last caches lie side by side.
    """

    index: Tensor  # [B, T] the row's tokens, aligned to the right; unused places in front hold any
    lengths: Sequence[int]  # [B] tokens of each sequence, longest first
    cell: Cell  # one of those they step under, which differ in their budgets alone
    documents: Sequence[int]  # [B] their numbers in the tally
    sources: Sequence[tuple[State, Tensor | None]] = ()  # what the sequences held before (None: all rows), B in all; empty: nothing
    order: Tensor | None = None  # [B] where each sequence is among the sources' rows
    grants: Grants | None = None  # None: as granted before
    completes: int = 0  # the step from which every token completes a prompt or message; T for none
    paths: Tensor | None = None  # [B, T] how many answers run through the token; None for prompts
    state: State = field(default_factory=State)
    foreseen: Foreseen | None = None

    def __post_init__(self) -> None:
        self.places = Places(self.index)
        self.once = self.paths is not None and bool((self.paths == 1).all())  # then no layer need multiply to count
        self.reached: dict[object, Tensor] = {}

    def attend(self, tokens: Tokens, counters: Counters) -> None:
        """Run the recurrence: read, attend, observe, write and evict, token by token."""
        start, steps = self.foreseen.cache if self.foreseen else self.begin(tokens), self.index.shape[1]
        query, guess, (keys, values) = (
            tokens.queries(self.places),
            tokens.guesses(self.places),
            tokens.entries(self.places),
        )
        outputs = torch.empty_like(query)
        cache, active = start, 0
        for step in range(steps):
            ready = sum(length >= steps - step for length in self.lengths)
            if ready > active:
                joining = start.rows(slice(active, ready)) if ready - active < len(self.lengths) else start
                cache, active = (LayerCache.stack([cache, joining]) if active else joining), ready
            now = slice(step, step + 1)
            expected = None if guess is None else guess[:active, :, :, now]
            asking = replace(cache, guess=expected)
            one = query[:active, :, :, now], keys[:active, :, now], values[:active, :, now]
            cache, output = self.step(asking, *one, step, counters, tokens.kernel)
            outputs[:active, :, :, now] = output
        self.finish(cache, outputs, tokens)

    def begin(self, tokens: Tokens) -> LayerCache:
        """Put side by side what the sequences hold before their first token here."""
        if self.sources:
            return self.going_on(tokens.layer.index)
        cache = self.cell.stowed(LayerCache.empty(tokens.layer, tokens.keys.transpose(0, 1)[None], len(self.lengths)))
        return self.cell.entitled(cache, self.grants)

    def going_on(self, layer: int) -> LayerCache:
        """Put side by side what a layer holds of the sequences that go on."""
        cache = gathered(self.sources, layer)
        return self.cell.entitled(cache if self.order is None else cache.rows(self.order), self.grants)

    def foresee(self, layer: int, guess: Tensor, counters: Counters) -> None:
        """Choose and fetch what the only token of each sequence reads in a layer, by `guess` [N, H x G, D], before the layer begins."""
        asks, host = "guess" in self.cell.policy.needs and self.index.shape[1] == 1, self.cell.host
        as_held = len(self.sources) == 1 and self.sources[0][1] is None and self.order is None  # nothing need be rearranged
        if host is None or not (asks and as_held and layer in self.sources[0][0].caches):
            return
        with counters.phase("policy"):
            cache = self.going_on(layer)
            expected = self.places.of(guess.unflatten(1, (cache.positions.shape[1], -1))).permute(0, 2, 3, 1, 4)
            few = self.read(replace(cache, guess=expected), expected)[1]
        if few is not None:
            host.hand(guess.device, few.order, few.used)
            with counters.phase("transfer"):
                self.foreseen = Foreseen(cache, few, cache.entries.chosen(few.order))

    def read(self, cache: LayerCache, query: Tensor) -> tuple[Tensor | None, Picked | None]:
        """Let the policy choose what the next token reads (None: all), and pick it where that pays."""
        if not (self.cell.policy.overrides("read") and cache.slots):
            return None, None
        read = self.cell.policy.read(cache, query)
        if read is None:
            return None, None
        return read, picked(self.cell.policy, cache, (read if cache.uniform else read & cache.open())[:, :, :, 0])

    def step(
        self, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor, step: int, counters: Counters, kernel: kernels.Kernel
    ) -> tuple[LayerCache, Tensor]:
        """Take in one token a sequence; return what is held then and the attention's output [B, H, G, 1, D]."""
        policy, place = self.cell.policy, "transfer" if cache.entries.away else "attention"
        ahead, self.foreseen = self.foreseen, None
        with counters.phase("policy"):
            read, few = self.read(cache, query) if ahead is None else (None, ahead.few)
        grown = cache.append(keys, values, decoding=True, complete=step >= self.completes)
        with counters.phase(place):
            if few is None:
                held = self.cell.entries(grown)
            else:
                held = joined(ahead.held if ahead else cache.entries.chosen(few.order), (keys, values))
        with counters.phase("attention"):
            allowed = few.visible() if few is not None else self.visible(grown, read)
            output, weighed = kernels.stepped(cache.layer, query, *held, allowed, kernel, looked_at=policy.overrides("evict"))
        if self.paths is not None and self.cell.tally is not None:
            self.count(grown, held[0].shape[2], allowed, step)
        if not policy.passive:
            with counters.phase("policy"):
                spread = weighed if few is None else lambda: few.spread(weighed(), cache.slots)
                grown = policy.observe(replace(grown, attended=(query, spread)), query)
                grown = policy.evict(policy.write(grown), query)
        with counters.phase(place):
            return self.cell.stowed(grown.expired()), output

    def visible(self, cache: LayerCache, read: Tensor | None) -> Tensor | None:
        """[B, H or 1, 1 or G, 1, S] what the newest token sees of what it chose to `read` (None: all), and of itself."""
        if read is None:
            return None if cache.uniform else cache.visible(1)
        return cache.visible(1) & torch.nn.functional.pad(read, (0, 1), value=True)

    def count(self, cache: LayerCache, width: int, allowed: Tensor | None, step: int) -> None:
        """Count what the queries read (None: all `width` entries they attended to): a query group's reads by their union."""
        assert self.paths is not None
        heads, documents = cache.positions.shape[1], self.documents[: len(cache.seen)]
        read = float(heads * width) if allowed is None else heads * allowed.any(2).sum((-1, -2)).float().mean(1)
        alike = step, heads, cache.layer.window, cache.seen.device
        if alike not in self.reached:  # made once for all layers that agree
            self.reached[alike] = cache.tokens * heads
        reach = self.reached[alike]
        if self.once:
            self.cell.count_read(documents, cache, read, reach, 1.0)
        else:
            paths = self.paths[: len(documents), step]
            self.cell.count_read(documents, cache, read * paths, reach * paths, paths)

    def finish(self, cache: LayerCache, outputs: Tensor, tokens: Tokens) -> None:
        """Hand on the caches and set the outputs of the places in use."""
        self.state.caches[cache.layer.index] = cache
        if self.paths is None or not self.sources:  # a prompt's end, or of a text without a prompt
            self.cell.count_held(self.documents, cache)
        steps = outputs.shape[3]
        if min(self.lengths) == steps:
            tokens.put(self.places, outputs)
            return
        lengths = torch.tensor(self.lengths, device=outputs.device)
        used = torch.arange(steps, device=outputs.device) >= steps - lengths[:, None]
        tokens.output[self.index[used]] = outputs.permute(0, 3, 1, 2, 4)[used]
