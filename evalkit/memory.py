"""One packed row of tokens, layer by layer: prompts taken in whole, policies acting, answers attending to what is left.

A row holds jobs. Inside every layer each job attends for its own tokens and hands caches on to the jobs after it. Knows no
tokenizer and no transformers. Shapes: N tokens in the row, B sequences of a job, H key/value heads, G queries per head, T tokens a
sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from . import kernels
from .cache import LayerCache
from .counters import Counters, Tally
from .entries import ELEMENT_BYTES, Plain
from .kernels import Kernel
from .layer import Layer
from .marks import NOTHING
from .offload import Host, Hosted
from .policy import Budget, Policy
from .shares import BYTES, DENSE_BYTES, FETCHED, FETCHED_BYTES, HELD, QUERIES, REACH, READ, SPAN
from .tokens import Places, Tokens


@dataclass
class State:
    """Each layer's cache of the same sequences, as some job left it."""

    caches: dict[int, LayerCache] = field(default_factory=dict)
    lasting: bool = False  # outlives the row: a session's memory


@dataclass(frozen=True)
class Grants:
    """For each of B sequences its budget, and the tokens that the budget is a share of."""

    of: Sequence[tuple[Budget, int]]
    known: dict[object, Tensor | None] = field(default_factory=dict, repr=False)

    def entries(self, layer: Layer, device: torch.device) -> Tensor | None:
        """[B] the entries granted each head in a layer; None where a budget is everything."""
        key = (layer.window, device)
        if key not in self.known:
            each = [budget.allowance(tokens, layer.window) for budget, tokens in self.of]
            self.known[key] = None if any(budget.whole for budget, _ in self.of) else torch.tensor(each, device=device)
        return self.known[key]


@dataclass(frozen=True)
class Cell:
    """A policy at work on a set of documents: what it prepared, and where its counts go."""

    policy: Policy
    prepared: Sequence[Mapping[str, Tensor]] = ()
    tally: Tally | None = None
    fetching: bool = False  # whether what is read is counted as fetched from host memory
    host: Host | None = None  # where entries are stored once a policy has acted; None leaves them on the device

    def entitled(self, cache: LayerCache, grants: Grants | None) -> LayerCache:
        """Tell the cache its allowance (kept from before where `grants` is None) and what was prepared for its layer."""
        allowance = cache.allowance if grants is None else grants.entries(cache.layer, cache.seen.device)
        return replace(cache, allowance=allowance, prepared=self.prepared[cache.layer.index] if self.prepared else NOTHING)

    def entries(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """The keys and values [B, H, S, D] as the next query meets them, keys rotated to where the policy places them."""
        keys, values = cache.entries.dense()
        places = self.policy.place(cache) if self.policy.overrides("place") else None
        if places is None or cache.layer.rope is None:
            return keys, values
        turns = (places - cache.positions).masked_fill(~cache.filled, 0)
        return kernels.rotated(keys, turns, cache.layer.rope.to(keys.device)), values

    def stowed(self, cache: LayerCache) -> LayerCache:
        """Have all entries in host memory, where this cell's belong there."""
        return cache if self.host is None else replace(cache, entries=Hosted.of(cache.entries, self.host))

    def count_held(self, documents: Sequence[int], cache: LayerCache) -> None:
        """Count what is held once the policy has acted on a prompt."""
        if self.tally is None:
            return
        heads, size, every = cache.positions.shape[1], cache.entries.size * ELEMENT_BYTES, float(cache.slots)
        span: Tensor | float = every * heads if self.policy.passive and cache.uniform else cache.tokens * heads
        bare = self.policy.lossless  # then nothing need be noted
        if cache.uniform and isinstance(cache.entries, Plain) and not cache.notes:  # no tensor need be made
            held: Tensor | float = every * heads
            cost = held * (size + (0 if bare else cache.marked) * ELEMENT_BYTES)
        else:
            held, cost = cache.counts.sum(1), cache.entries.cost(cache.counts) if bare else cache.cost()
        for what, counted in ((HELD, held), (SPAN, span), (BYTES, cost), (DENSE_BYTES, span * size)):
            self.tally.add(what, documents, counted)

    def count_read(
        self, documents: Sequence[int], cache: LayerCache, read: Tensor | float, reach: Tensor, queries: Tensor | float
    ) -> None:
        """Count `read` [B] entries attended to by `queries` [B] (or as many each), where the full cache would attend to `reach` [B]."""
        if self.tally is None:
            return
        self.tally.add(READ, documents, read)
        self.tally.add(REACH, documents, reach)
        if cache.layer.index == 0:
            self.tally.add(QUERIES, documents, queries)
        if self.fetching:
            fetched = read - queries * cache.positions.shape[1]  # the newest token is not in host memory yet
            self.tally.add(FETCHED, documents, fetched)
            self.tally.add(FETCHED_BYTES, documents, fetched * cache.entries.size * ELEMENT_BYTES)


@dataclass(frozen=True)
class Begun:
    """What all prompts begin with, taken in once: under each policy, less its budget, what it has observed so far."""

    tokens: tuple[int, ...]
    states: dict[Policy, State]

    def state(self, policy: Policy) -> State:
        """Return a state to go on from under `policy`."""
        return State(dict(self.states[policy.statistic()].caches))


class Job(Protocol):
    """Some of the row's tokens and how they attend."""

    def attend(self, tokens: Tokens, counters: Counters) -> None:
        """Set the outputs of the job's tokens in one layer, and leave caches for the jobs after it."""


@dataclass
class Branch:
    """One cell's part in a block: the policy acts on the block's sequences and leaves them in `state`."""

    cell: Cell
    grants: Grants | None  # None: as granted before
    documents: Sequence[int]  # [B] their numbers in the tally
    state: State = field(default_factory=State)

    def act(self, cache: LayerCache, query: Tensor) -> LayerCache:
        """Let the policy write and evict, once the block is whole."""
        policy = self.cell.policy
        return policy.evict(policy.write(cache), query)

    def stow(self, layer: Layer) -> None:
        """Bring what is left to where the cell's entries belong."""
        self.state.caches[layer.index] = self.cell.stowed(self.state.caches[layer.index])


@dataclass
class Block:
    """Prompts or messages of equal length, taken in whole: every token attends to all before it that is held."""

    index: Tensor  # [B, T] the row's tokens of each sequence, those shared with others in front
    own: int  # how many at the end are this block's to attend for
    branches: list[Branch]
    before: State | None = None  # what the sequences held until now
    complete: bool = True  # whether the prompt or message ends here

    def __post_init__(self) -> None:
        self.places = Places(self.index)
        self.last = Places(self.index[:, self.index.shape[1] - self.own :])  # the tokens to attend for

    def attend(self, tokens: Tokens, counters: Counters) -> None:
        """Attend, then let each branch's policy act."""
        layer = tokens.layer
        keys, values = tokens.entries(self.places)
        if self.before is None:
            cache = LayerCache.begun(layer, keys, values, complete=self.complete)
        else:  # each branch has its own marks and notes
            held = replace(self.before.caches[layer.index], marks=NOTHING, notes=NOTHING)
            cache = held.append(keys, values, complete=self.complete)
        drawn = None
        if self.own and tokens.matter(self.last) and not self.attends_packed(tokens):  # of a prompt's one token nothing is taken in
            with counters.phase("attention"):
                output, drawn = self.attention(cache, tokens.queries(self.last), tokens.kernel)
                tokens.put(self.last, output)
        with counters.phase("policy"):
            self.act(cache, tokens, drawn)
        if self.complete:
            with counters.phase("transfer"):
                for branch in self.branches:
                    branch.stow(layer)

    def attends_packed(self, tokens: Tokens) -> bool:
        """Whether the row attends for this block together with others, by flash-attn over packed segments."""
        begins = self.before is None and 0 < self.own == self.index.shape[1] and tokens.matter(self.last)
        return begins and tokens.kernel == "flash" and tokens.layer.sinks is None

    def attention(self, cache: LayerCache, query: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor | None]:
        """Attend from the block's own queries, [B, H, G, T, D]; return also what slots received, where that is asked for and known."""
        cell = self.branches[0].cell if self.branches and self.before is not None else None
        if cell is not None and cell.policy.overrides("place"):
            count = query.shape[3]
            mask = lambda start, stop: cache.visible(count, start, stop)  # noqa: E731
            blocks = cache.blocks(count, query.shape[2])
            return kernels.masked(cache.layer, query, *cell.entries(cache), mask, blocks, kernel), None
        looked_at = any("received" in branch.cell.policy.needs for branch in self.branches) and self.own == self.index.shape[1]
        if looked_at and not kernels.fused(kernel, query):
            return kernels.drawing(cache, query)
        return kernels.whole(cache, query, kernel), None

    def act(self, cache: LayerCache, tokens: Tokens, drawn: Tensor | None) -> None:
        """Let every branch observe (once for all that agree), write and evict. What slots received may be `drawn` already."""
        observed: dict[Policy | None, LayerCache] = {}
        asked = any(not branch.cell.policy.passive for branch in self.branches)
        query = tokens.queries(self.places) if asked else None
        for branch in self.branches:
            policy, mine = branch.cell.policy, branch.cell.entitled(cache, branch.grants)
            if query is not None and not policy.passive and self.index.shape[1]:
                statistic = policy.statistic() if len(self.branches) > 1 else None
                seen = observed.get(statistic)
                if seen is None:
                    mine = observed[statistic] = observing(policy, self.remembered(branch, mine), query, drawn)
                else:
                    mine = replace(mine, marks=seen.marks, notes=seen.notes)
                mine = branch.act(mine, query) if self.complete else mine
            branch.state.caches[cache.layer.index] = mine
            if self.complete:
                branch.cell.count_held(branch.documents, mine)

    def remembered(self, branch: Branch, cache: LayerCache) -> LayerCache:
        """Give the cache the marks and notes that the branch's policy left at earlier blocks or messages."""
        earlier = branch.state.caches.get(cache.layer.index)
        return cache if earlier is None else cache.remembering(earlier)


def observing(policy: Policy, cache: LayerCache, query: Tensor, drawn: Tensor | None) -> LayerCache:
    """Let a policy observe queries, of which slots may be known already to have received what was `drawn`."""
    if drawn is None:
        return policy.observe(cache, query)
    return replace(policy.observe(replace(cache, drawn=(query, drawn)), query), drawn=None)
