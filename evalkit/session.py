"""Runs policies on a model: documents scored under many cells in packed rows, and sessions that go on.

Knows tokens; knows no text and no task.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from . import attention, kernels
from .attention import PreTrainedModel
from .cache import LayerCache
from .calibration import prepared, projections, text
from .counters import Counters, Tally
from .errors import UsageError
from .memory import Block, Branch, Cell, Row, State, Wave
from .packing import Asked, Branches, Document, Packing
from .policy import Budget, Policy

PROTOCOLS = ("prompt", "stream")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Score:
    """How likely an answer is: its summed log-probability, and whether greedy decoding would say it."""

    logprob: float
    greedy: bool


@dataclass
class CellScores:
    """One cell's scores, document by document, and its tally."""

    policy: Policy
    scores: list[list[Score]]
    tally: Tensor  # [counters.WHAT, documents]


@dataclass
class Engine:
    """A model ready to run policies. `row_tokens` are packed into a forward pass; longer prompts arrive in blocks of `block_tokens`."""

    model: PreTrainedModel
    attn: str = "sdpa"
    row_tokens: int = 1024
    block_tokens: int = 4096
    row_documents: int | None = None  # at most so many documents share a row
    calibration: Callable[[], Sequence[int]] | None = None  # tokens of the text that policies prepare on
    counters: Counters = field(default_factory=Counters)
    _prepared: dict[Policy, Sequence[Mapping[str, Tensor]]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.kernel = kernels.known(self.attn, self.device)
        attention.attach(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[union-attr, return-value]

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The sliding windows that some layers may have."""
        window = getattr(self.model.config, "sliding_window", None)
        return () if window is None else (window,)

    def cell(self, policy: Policy, tally: Tally | None = None) -> Cell:
        """Set a policy to work on this model: prepare it where it asks for that."""
        if "rope" in policy.needs and not attention.ropes(self.model):
            raise UsageError(
                f"{type(policy).__name__} rotates keys to new positions and {self.model.config.model_type} models do not rotate them: "
                "use its preset 'original'"
            )
        if not policy.overrides("prepare"):
            return Cell(policy, (), tally)
        key = policy.statistic()
        if key not in self._prepared:
            with self.counters.phase("prepare"):
                self._prepared[key] = prepared(policy, self)
        return Cell(policy, self._prepared[key], tally)

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        """Return each attention layer's queries [1, H, G, T, D] and keys [1, H, T, D], rotated, on the calibration text."""
        return projections(self.model, text(self.model, self.calibration), self.kernel)

    # Scoring

    def score(
        self,
        documents: Sequence[Document],
        policies: Sequence[Policy],
        protocol: str = "prompt",
        progress: Progress | None = None,
    ) -> list[CellScores]:
        """Score every document's answers under every policy; prompts are taken in once for all policies that allow it."""
        for policy in policies:
            policy.check(protocol)
        cells = [self.cell(policy, Tally(len(documents), self.device)) for policy in policies]
        scoring = _Scoring(self, documents, cells, protocol)
        for batch in scoring.rows():
            scoring.run(batch)
            if progress:
                progress(len(batch))
        return scoring.results()

    def open(self, policy: Policy, protocol: str = "prompt") -> Session:
        """Start a sequence under a policy."""
        policy.check(protocol)
        if "whole_answer" in policy.needs:
            raise UsageError(
                f"{type(policy).__name__} at these settings simulates prompt and answer in one pass and cannot go on: use another preset"
            )
        return Session(self, self.cell(policy), protocol)

    def run(self, packing: Packing, cells: Iterable[Cell], length: int = 0) -> Tensor:
        """Run a packed row; return the logits [W, V] at its readout's places, each place once, in order.

        A rotation that follows the length is that of a sequence of `length` tokens where the row's own are fewer.
        """
        guessing = any("guess" in cell.policy.needs for cell in cells)
        wanted = sorted(set(packing.readout.places)) or [len(packing.tokens) - 1]
        if length and attention.follows_length(self.model.config):
            packing.place((0,), length - 1)  # nothing attends to it
        row = Row(packing.jobs, self.counters, self.kernel, guessing)
        self.counters.count("computed", len(packing.tokens))
        with self.counters.phase("forward"):
            return attention.run(
                self.model,
                row,
                packing.tokens,
                packing.positions,
                wanted,
            )

    def take_in(
        self, tokens: Sequence[int], start: int, branches: list[Branch], before: State | None, complete: bool = True
    ) -> None:
        """Take in a prompt or message whole, in blocks where it is long; the branches' policies act at its end."""
        for first, last in self.blocks(len(tokens), branches):
            packing = Packing()
            index = torch.tensor([packing.place(tokens[first:last], start + first)])
            ends = complete and last == len(tokens)
            packing.jobs.append(Block(index, last - first, branches, before, ends))
            self.run(packing, [], start + len(tokens) + 1)
            before = branches[0].state

    def blocks(self, count: int, branches: Sequence[Branch]) -> list[tuple[int, int]]:
        """Cut a prompt into blocks; the last is the longest, so that it holds every policy's observation window."""
        if attention.follows_length(self.model.config):
            return [(0, count)]
        size = max(self.block_tokens, *(getattr(branch.cell.policy, "window", 1) for branch in branches))
        starts = list(range(0, max(count - size, 0) + 1, size)) if count >= size else [0]
        return list(zip(starts, [*starts[1:], count], strict=True))


@dataclass
class _Scoring:
    """Documents on their way through packed rows."""

    engine: Engine
    documents: Sequence[Document]
    cells: Sequence[Cell]
    protocol: str

    def __post_init__(self) -> None:
        self.work: list[list[Asked]] = []
        self.where: list[list[Asked]] = []  # for every document and cell, under which equal cell it is scored
        slots = 0
        for number, document in enumerate(self.documents):
            equals: dict[object, Asked] = {}
            self.where.append([])
            for cell in self.cells:
                key = self.identity(cell.policy, document)
                if key not in equals:
                    equals[key] = Asked(number, document, cell, range(slots, slots + len(document.answers)))
                    slots += len(document.answers)
                self.where[-1].append(equals[key])
            self.work.append(list(equals.values()))
        self.logprobs = torch.zeros(slots, dtype=torch.float64, device=self.engine.device)
        self.misses = torch.zeros(slots, dtype=torch.long, device=self.engine.device)

    def identity(self, policy: Policy, document: Document) -> object:
        """What must agree for two cells to compute the same: everything but the budget, and what the budget grants."""
        if "whole_answer" in policy.needs:  # its budget is a share of each answer's whole sequence
            return policy
        budget, windows = policy.budget, (None, *self.engine.windows)
        grants = None if budget.whole else tuple(budget.allowance(document.basis, window) for window in windows)
        return (replace(policy, budget=Budget()), grants)

    def streams(self, policy: Policy) -> bool:
        return self.protocol == "stream" and not policy.passive

    def apart(self, policy: Policy) -> bool:
        """Whether the policy's prompts cannot be shared with other cells."""
        return self.streams(policy) or "whole_answer" in policy.needs

    def size(self, asked: Sequence[Asked]) -> int:
        """The tokens a document adds to a row, about."""
        tree = sum(len(node.tokens) for node in asked[0].document.tree().walk())
        prompt = len(asked[0].document.taken)
        apart = sum(self.apart(one.cell.policy) for one in asked)
        return len(asked) * tree + (apart + (apart < len(asked))) * prompt

    def rows(self) -> list[list[list[Asked]]]:
        """Part the documents into rows: those that share a beginning together, long ones first."""
        config = self.engine.model.config
        longest = lambda asked: len(asked[0].document.prompt) + max(map(len, asked[0].document.answers)) - 1  # noqa: E731
        batches: list[list[list[Asked]]] = []
        room, last = 0, None
        parts = [part for asked in self.work for part in self.parts(asked)]
        for family in sorted(_families(parts), key=lambda family: -max(map(longest, family))):
            for asked in family:
                regime, size = attention.regime(config, longest(asked)), self.size(asked)
                full = bool(batches) and len(batches[-1]) == self.engine.row_documents
                if not batches or size > room or regime != last or full:
                    batches.append([])
                    room, last = self.engine.row_tokens, regime
                batches[-1].append(asked)
                room -= size
        return batches

    def parts(self, asked: list[Asked]) -> list[list[Asked]]:
        """Part a document by the rotations that its answers' lengths get; nearly always there is one."""
        document, groups = asked[0].document, defaultdict(list)
        for i, answer in enumerate(document.answers):
            groups[attention.regime(self.engine.model.config, len(document.prompt) + len(answer) - 1)].append(i)
        return [asked] if len(groups) == 1 else [[one.only(chosen) for one in asked] for chosen in groups.values()]

    def run(self, batch: Sequence[list[Asked]]) -> None:
        """Score one row's documents."""
        packing, whole = Packing(), []
        streamed: dict[int, list[Asked]] = {}
        packing.simulated([one for asked in batch for one in asked if "whole_answer" in one.cell.policy.needs])
        branches: Branches = []
        rotating = attention.follows_length(self.engine.model.config)  # then a prompt must share its answers' row
        for asked in batch:
            inside = [one for one in asked if not self.apart(one.cell.policy)]
            for one in asked:
                if self.streams(one.cell.policy):
                    streamed.setdefault(id(one.cell), []).append(one)
            if len(asked[0].document.taken) > self.engine.block_tokens and inside and not rotating:
                branches += self.taken_before(inside)
            elif inside:
                whole.append(inside)
        branches += packing.prompts(whole) if whole else []
        packing.answers(branches)
        for same in streamed.values():
            packing.answers(packing.streams(same), stream=True)
        self.settle(packing, self.engine.run(packing, [one.cell for asked in batch for one in asked]))

    def taken_before(self, asked: Sequence[Asked]) -> Branches:
        """Take in a long prompt in blocks, in rows of its own."""
        branches = [Branch(one.cell, [one.document.basis], [one.number], State(lasting=True)) for one in asked]
        self.engine.take_in(asked[0].document.taken, 0, branches, None)
        return [(branch, [one]) for branch, one in zip(branches, asked, strict=True)]

    def settle(self, packing: Packing, logits: Tensor) -> None:
        """Add up what the row's logits [W, V] say of each answer."""
        with self.engine.counters.phase("readout"):
            at, targets, slots = packing.readout.sorted()
            logprobs, best = likelihoods(logits, at, targets)
            where = torch.tensor(slots, device=self.logprobs.device)
            self.logprobs.index_add_(0, where, logprobs.to(self.logprobs))
            self.misses.index_add_(0, where, (~best).to(self.misses))

    def results(self) -> list[CellScores]:
        """Return every cell's scores, in the documents' order."""
        logprobs, misses = self.logprobs.tolist(), self.misses.tolist()
        tallies = {id(cell): cell.tally.totals() for cell in self.cells if cell.tally}
        results = []
        for number, cell in enumerate(self.cells):
            where = [row[number] for row in self.where]
            scores = [[Score(logprobs[slot], not misses[slot]) for slot in asked.slots] for asked in where]
            columns = [tallies[id(asked.cell)][:, document] for document, asked in enumerate(where) if id(asked.cell) in tallies]
            results.append(CellScores(cell.policy, scores, torch.stack(columns, 1) if columns else torch.zeros(0, 0)))
        return results


def _families(work: Sequence[list[Asked]]) -> list[list[list[Asked]]]:
    """Put documents whose prompts begin alike next to each other."""
    ordered = sorted(work, key=lambda asked: asked[0].document.prompt)
    families: list[list[list[Asked]]] = []
    for asked in ordered:
        begins = asked[0].document.prompt[:8]
        if families and len(begins) == 8 and families[-1][-1][0].document.prompt[:8] == begins:
            families[-1].append(asked)
        else:
            families.append([asked])
    return families


def likelihoods(logits: Tensor, at: Sequence[int], targets: Sequence[int], chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Return the log-probability of `targets` [R] at rows `at` [R] of `logits` [W, V], and whether each is its row's likeliest token.

    In fp32 (fp64 for fp64 models) by log_softmax, as lm-eval does it, so that rounding agrees with its own models. `at` ascends.
    """
    logprobs, best = [], []
    for start in range(0, len(logits), chunk):
        low, high = bisect_left(at, start), bisect_left(at, start + chunk)
        part = logits[start : start + chunk]
        exact = part if part.dtype == torch.float64 else part.float()
        rows = torch.tensor(at[low:high], dtype=torch.long, device=logits.device) - start
        wanted = torch.tensor(targets[low:high], dtype=torch.long, device=logits.device)
        logprobs.append(exact.log_softmax(-1)[rows, wanted])
        best.append(exact.argmax(-1)[rows] == wanted)
    return torch.cat(logprobs), torch.cat(best)


@dataclass
class Session:
    """A sequence that goes on under one policy. Its newest token always waits: it is the first to be answered from what is held.

    Taken in with the rest it would attend to the whole prompt, and a one-token answer would never meet the policy.
    """

    engine: Engine
    cell: Cell
    protocol: str = "prompt"
    state: State = field(default_factory=lambda: State(lasting=True))
    waiting: tuple[int, ...] = ()
    seen: int = 0
    rotation: int = 0  # the regime that what is held was rotated under
    said: tuple[int, Mapping[int, LayerCache]] | None = None  # the last token taken in while generating, and what was held before it

    @property
    def caches(self) -> list[LayerCache]:
        """What each layer holds, the waiting token not among it."""
        return [self.state.caches[layer] for layer in sorted(self.state.caches)]

    def fork(self) -> Session:
        """Return a session that goes on from here and leaves this one as it is."""
        return replace(self, state=State(dict(self.state.caches), lasting=True))

    def feed(self, tokens: Sequence[int], *, decoded: bool = False) -> None:
        """Take in a prompt or a message, or a reply as if it had been `decoded`; the policy acts at its end, the newest token waits."""
        if not (self.waiting or tokens):
            raise UsageError("a session cannot start from no tokens: feed it one or more, such as the tokenizer's BOS")
        self.conclude()
        *ready, newest = (*self.waiting, *tokens)
        if ready:
            end = self.seen + len(ready)
            self.rotate(end + 1)
            if self.cell.policy.passive or not (decoded or self.protocol == "stream"):
                branch = Branch(self.cell, [end], [0], self.state)
                self.engine.take_in(ready, self.seen, [branch], self.state if self.state.caches else None)
                self.seen = end
            elif decoded:  # a reply goes on under the budget granted before it
                self.advance(ready[:-1], None if self.state.caches else end, acts=self.protocol == "stream", length=end + 1)
                self.advance(ready[-1:], end, acts=True, length=end + 1)
            else:
                self.advance(ready, end, acts=True, length=end + 1)
        self.waiting = (newest,)

    def advance(self, tokens: Sequence[int], basis: int | None, *, acts: bool, length: int = 0) -> None:
        """Take in tokens one by one; the policy acts as at a message's end at each of them, or at none. `basis` is granted anew."""
        if tokens:
            self.step(tokens, None if basis is None else [basis], 0 if acts else len(tokens), length)
            self.seen += len(tokens)

    def conclude(self) -> None:
        """End a generated reply: take in its last token again, as the one at which the budget is granted anew and the policy acts."""
        if self.said is not None and not self.cell.policy.passive:
            token, held = self.said
            self.state, self.seen = State(dict(held), lasting=True), self.seen - 1
            self.advance([token], self.seen + 1, acts=True)
        self.said = None

    def step(self, tokens: Sequence[int], granted: Sequence[int] | None, completes: int, length: int = 0) -> Tensor:
        """Take in tokens one by one under the policy; return the logits [1, V] after the last. `length` is `Engine.run`'s."""
        packing = Packing()
        index = torch.tensor([packing.place(tokens, self.seen)])
        sources = [(State(dict(self.state.caches)), None)] if self.state.caches else []
        wave = Wave(index, [len(tokens)], self.cell, [0], sources, granted=granted, completes=completes, state=self.state)
        packing.jobs.append(wave)
        return self.engine.run(packing, [self.cell], length)

    def rotate(self, *lengths: int, stepping: bool = False) -> None:
        """Raise UsageError where a sequence of one of these lengths would have to rotate anew what is held.

        `stepping` token by token under a dynamic rotation is what transformers does too: what is held stays as it was.
        """
        config = self.engine.model.config
        regimes = {attention.regime(config, length) for length in lengths}
        if self.state.caches and not (stepping and regimes == set(lengths)):
            regimes.add(self.rotation)
        if len(regimes) > 1:
            raise UsageError(
                f"at {max(lengths)} tokens this {config.model_type} model rotates all keys anew and a session's cannot follow: "
                "stay below, or score whole documents"
            )
        self.rotation = regimes.pop()

    def score(self, answers: Sequence[Sequence[int]]) -> list[Score]:
        """Return how likely each of `answers` is to come next; the session stays as it was."""
        scored = self.ask(answers)
        return scored.results()[0].scores[0]

    def ask(self, answers: Sequence[Sequence[int]]) -> _Scoring:
        """Score `answers` in one row after what is held."""
        self.rotate(*(self.seen + len(answer) for answer in answers))
        document = Document(self.waiting, tuple(tuple(answer) for answer in answers), self.seen, self.seen)
        scoring = _Scoring(self.engine, [document], [self.cell], self.protocol)
        packing, asked = Packing(), scoring.work[0]
        if self.state.caches:
            packing.answers(
                [(Branch(self.cell, None, [0], self.state), asked)],
                stream=self.protocol == "stream",
            )
        else:
            packing.answers(packing.prompts([asked]), stream=self.protocol == "stream")
        scoring.settle(packing, self.engine.run(packing, [self.cell]))
        return scoring

    def generate(self, limit: int, stop: Callable[[list[int]], bool], choose: Callable[[Tensor], int] | None = None) -> list[int]:
        """Say up to `limit` tokens, until `stop` of what was said; the last one said waits.

        `choose` picks a token from logits [V]; greedy decoding unless given.
        """
        said: list[int] = []
        while len(said) < limit:
            self.rotate(self.seen + 1, stepping=True)
            granted = None if self.state.caches else [self.seen]  # a prompt of one token has taken in none
            self.said = (self.waiting[0], dict(self.state.caches))
            logits = self.step(self.waiting, granted, 0 if self.protocol == "stream" else 1)
            self.seen += 1
            token = int(logits[-1].argmax()) if choose is None else choose(logits[-1])
            self.waiting = (token,)
            said.append(token)
            if stop(said):
                break
        return said
