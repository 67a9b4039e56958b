"""One packed row of tokens, layer by layer: prompts taken in whole, policies acting, answers attending to what is left.

A row holds jobs. Inside every layer each job attends for its own tokens and hands caches on to the jobs after it. Knows no
tokenizer and no transformers. Shapes: N tokens in the row, B sequences of a job, H key/value heads, G queries per head, T tokens a
sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from . import kernels
from .cache import NOTHING, LayerCache
from .counters import Counters, Tally
from .entries import ELEMENT_BYTES
from .kernels import Kernel
from .layer import Layer
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

    def count_held(self, documents: Sequence[int], cache: LayerCache) -> None:
        """Count what is held once the policy has acted on a prompt."""
        if self.tally is None:
            return
        heads, size = cache.positions.shape[1], cache.entries.size * ELEMENT_BYTES
        if self.policy.passive and cache.uniform:  # all there is, of one length: no tensor need be made
            entries = float(cache.slots * heads)
            for what, counted in ((HELD, entries), (SPAN, entries), (BYTES, entries * size), (DENSE_BYTES, entries * size)):
                self.tally.add(what, documents, counted)
            return
        span = cache.tokens * heads
        self.tally.add(HELD, documents, float(cache.slots * heads) if cache.uniform else cache.counts.sum(1))
        self.tally.add(SPAN, documents, span)
        bare = self.policy.lossless  # then nothing need be noted
        self.tally.add(BYTES, documents, cache.entries.cost(cache.counts) if bare else cache.cost())
        self.tally.add(DENSE_BYTES, documents, span * size)

    def count_read(self, documents: Sequence[int], cache: LayerCache, read: Tensor, reach: Tensor, queries: Tensor) -> None:
        """Count `read` [B] entries attended to by `queries` [B], where the full cache would attend to `reach` [B]."""
        if self.tally is None:
            return
        self.tally.add(READ, documents, read)
        self.tally.add(REACH, documents, reach)
        if cache.layer.index == 0:
            self.tally.add(QUERIES, documents, queries)
        if self.policy.host:
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
        if self.own and not self.attends_packed(tokens):  # a prompt of one token takes in nothing: its only token waits
            with counters.phase("attention"):
                tokens.put(self.last, self.attention(cache, tokens.queries(self.last), tokens.kernel))
        with counters.phase("policy"):
            self.act(cache, tokens)

    def attends_packed(self, tokens: Tokens) -> bool:
        """Whether the row attends for this block together with others, by flash-attn over packed segments."""
        begins = self.before is None and 0 < self.own == self.index.shape[1]
        return begins and tokens.kernel == "flash" and tokens.layer.sinks is None

    def attention(self, cache: LayerCache, query: Tensor, kernel: Kernel) -> Tensor:
        """Attend from the block's own queries, [B, H, G, T, D]."""
        cell = self.branches[0].cell if self.branches and self.before is not None else None
        if cell is None or not cell.policy.overrides("place"):
            return kernels.whole(cache, query, kernel)
        count = query.shape[3]
        mask = lambda start, stop: cache.visible(count, start, stop)  # noqa: E731
        blocks = cache.blocks(count, query.shape[2])
        return kernels.masked(cache.layer, query, *cell.entries(cache), mask, blocks, kernel)

    def act(self, cache: LayerCache, tokens: Tokens) -> None:
        """Let every branch observe (once for all that agree), write and evict."""
        observed: dict[Policy, LayerCache] = {}
        asked = any(not branch.cell.policy.passive for branch in self.branches)
        query = tokens.queries(self.places) if asked else None
        for branch in self.branches:
            policy, mine = branch.cell.policy, branch.cell.entitled(cache, branch.grants)
            if query is not None and not policy.passive and self.index.shape[1]:
                statistic = policy.statistic()
                if statistic not in observed:
                    observed[statistic] = policy.observe(self.remembered(branch, mine), query)
                seen = observed[statistic]
                mine = replace(mine, marks=seen.marks, notes=seen.notes)
                mine = branch.act(mine, query) if self.complete else mine
            branch.state.caches[cache.layer.index] = mine
            if self.complete:
                branch.cell.count_held(branch.documents, mine)

    def remembered(self, branch: Branch, cache: LayerCache) -> LayerCache:
        """Give the cache the marks and notes that the branch's policy left at earlier blocks or messages."""
        earlier = branch.state.caches.get(cache.layer.index)
        return replace(cache, marks=NOTHING, notes=NOTHING) if earlier is None else cache.remembering(earlier)


@dataclass
class Row:
    """A packed row: its jobs, run in order inside every layer."""

    jobs: list[Job]
    counters: Counters
    kernel: Kernel = "sdpa"
    guessing: bool = False  # whether some policy wants the query guessed from the layer before
    guess: Tensor | None = None  # the guess for the layer at hand, [1, H x G, N, D]
    previous: Tensor | None = None  # what the layer before was given
    rehearsing: bool = False  # whether a layer runs for its guess only
    ropes: Callable[[], Mapping[str | None, Tensor]] = dict  # inverse frequencies by layer type, as the row needs them
    depth: int = 1  # attention layers in the model

    def attend(self, layer: Layer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend in one layer for the whole row: `query` [1, H x G, N, D], `keys`, `values` [1, H, N, D]; returns [1, N, H x G, D]."""
        heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        spread = lambda tensor: tensor[0].transpose(0, 1).unflatten(1, (heads, group))  # noqa: E731
        output = query.new_zeros(query.shape[2], heads, group, values.shape[3])
        guessed = None if self.guess is None else spread(self.guess)
        tokens = Tokens(layer, spread(query), keys[0].transpose(0, 1), values[0].transpose(0, 1), guessed, output, self.kernel)
        for job in self.jobs:
            move(job, output.device)
        self.attend_packed(tokens)
        for job in self.jobs:
            job.attend(tokens, self.counters)
        self.forget(layer)
        return output.flatten(1, 2)[None]

    def attend_packed(self, tokens: Tokens) -> None:
        """Attend for all prompts that begin in this row by one flash-attn call, where that kernel is asked for."""
        blocks = [job for job in self.jobs if isinstance(job, Block) and job.attends_packed(tokens)]
        if not blocks:
            return
        places = torch.cat([block.index.flatten() for block in blocks])
        lengths = [block.index.shape[1] for block in blocks for _ in block.index]
        query, keys, values = (part.index_select(0, places) for part in (tokens.query.flatten(1, 2), tokens.keys, tokens.values))
        with self.counters.phase("attention"):
            output = kernels.flash_packed(tokens.layer, query, keys, values, lengths)
        tokens.output.index_copy_(0, places, output.view(-1, *tokens.output.shape[1:]))

    def forget(self, layer: Layer) -> None:
        """Let go of the layer's caches that no session keeps."""
        for job in self.jobs:
            for state in states(job):
                if not state.lasting:
                    state.caches.pop(layer.index, None)


def states(job: Job) -> list[State]:
    """Return the states a job leaves caches in: its own, or its branches'."""
    return [job.state] if hasattr(job, "state") else [branch.state for branch in getattr(job, "branches", ())]


def move(job: object, device: torch.device) -> None:
    """Bring a job's index tensors to the device its layer lives on (models spread over several)."""
    for holder in (job, *getattr(job, "branches", ())):
        for name, value in vars(holder).items():
            if isinstance(value, Tensor) and value.device != device:
                setattr(holder, name, value.to(device))
            elif isinstance(value, Places):
                move(value, device)
