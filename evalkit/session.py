"""What is done with a model under policies: documents scored, sessions that go on. Knows tokens; knows no text and no task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import attention
from .cache import LayerCache
from .counters import Tally
from .decoding import Wave
from .documents import Document, shared
from .engine import Runner
from .errors import UsageError
from .memory import Block, Branch, Cell, Grants, State
from .packing import Packing
from .policy import Policy
from .replies import Reply
from .scoring import CellScores, Score, Scoring

Progress = Callable[[int], None]


@dataclass
class Engine(Runner):
    """A model ready to run policies: `score` takes documents, `open` starts a session."""

    def score(
        self,
        documents: Sequence[Document],
        policies: Sequence[Policy],
        protocol: str = "prompt",
        progress: Progress | None = None,
        prefix: int | None = None,
    ) -> list[CellScores]:
        """Score every document's answers under every policy; prompts are taken in once for all policies that allow it.

        `prefix` is how many tokens all prompts begin with, of these documents and of those scored before and after; None: these.
        """
        for policy in policies:
            policy.check(protocol)
        tally = Tally(len(policies) * len(documents), self.device)
        cells = [self.cell(policy, tally) for policy in policies]
        scoring = Scoring(self, documents, cells, protocol, shared(documents) if prefix is None else prefix)
        for batch in scoring.rows():
            scoring.run(batch)
            if progress:
                progress(len(batch))
        return scoring.results()

    def open(self, policy: Policy, protocol: str = "prompt", tally: Tally | None = None) -> Session:
        """Start a sequence under a policy; what it holds and reads goes into `tally`, of one document."""
        policy.check(protocol)
        if "whole_answer" in policy.needs:
            raise UsageError(
                f"{type(policy).__name__} at these settings simulates prompt and answer in one pass and cannot go on: use another preset"
            )
        return Session(self, self.cell(policy, tally), protocol)


@dataclass
class Session:
    """A sequence that goes on under one policy. Its newest token always waits: it is the first to be answered from what is held.

    Taken in with the rest it would attend to the whole prompt, and a one-token answer would never meet the policy.
    """

    engine: Runner
    cell: Cell
    protocol: str = "prompt"
    state: State = field(default_factory=lambda: State(lasting=True))
    waiting: tuple[int, ...] = ()
    seen: int = 0
    rotation: int = 0  # the regime that what is held was rotated under
    # The last token taken in while generating, and what was held before it.
    said: tuple[int, Mapping[int, LayerCache]] | None = None
    fed: float | None = None  # the seconds that taking in the last message took, until a token is said after it

    @property
    def caches(self) -> list[LayerCache]:
        """What each layer holds, the waiting token not among it."""
        return [self.state.caches[layer] for layer in sorted(self.state.caches)]

    def fork(self) -> Session:
        """Return a session that goes on from here and leaves this one as it is."""
        return replace(self, state=State(dict(self.state.caches), lasting=True))

    def feed(self, tokens: Sequence[int], *, decoded: bool = False) -> None:
        """Take in a prompt or a message, or a reply as if it had been `decoded`; the policy acts at its end, the newest token waits."""
        start = self.engine.counters.now()
        self.take_in(tokens, decoded=decoded)
        self.fed = self.engine.counters.fed(start, decoded=decoded)

    def take_in(self, tokens: Sequence[int], *, decoded: bool = False) -> None:
        """Do what `feed` does; the seconds are for others to count."""
        packing = Packing()
        if not self.long(tokens, decoded=decoded):
            self.pack(packing, tokens, decoded=decoded)
            self.run(packing)
            return
        *ready, newest = (*self.waiting, *tokens)
        self.rotate(self.seen + len(ready) + 1)
        self.conclude()
        self.engine.take_in(ready, self.seen, [self.branch(len(ready))], self.state if self.seen else None)
        self.waiting, self.seen = (newest,), self.seen + len(ready)

    def run(self, packing: Packing) -> None:
        """Run a row that this session's tokens were packed into."""
        if packing.jobs:
            self.engine.run(packing, self.seen + 1)

    def whole(self, *, decoded: bool) -> bool:
        """Whether a message is attended to whole: the policy has no say in it until its end."""
        return self.cell.policy.passive or not (decoded or self.protocol == "stream")

    def long(self, tokens: Sequence[int], *, decoded: bool = False) -> bool:
        """Whether a message is to arrive in several rows."""
        count = len(self.waiting) + len(tokens) - 1
        return self.whole(decoded=decoded) and count > 0 and len(self.engine.blocks(count, [self.branch(count)])) > 1

    def pack(self, packing: Packing, tokens: Sequence[int], *, decoded: bool = False) -> None:
        """Put what `feed` takes in into a row that is yet to be run, beside what other sessions put there."""
        if not (self.waiting or tokens):
            raise UsageError("a session cannot start from no tokens: feed it one or more, such as the tokenizer's BOS")
        *ready, newest = (*self.waiting, *tokens)
        end = self.seen + len(ready)
        if ready:
            self.rotate(end + 1)
        self.pack_end(packing)
        if ready and self.whole(decoded=decoded):
            index = torch.tensor([packing.place(ready, self.seen)])
            packing.jobs.append(Block(index, len(ready), [self.branch(len(ready))], self.state if self.seen else None))
        elif ready and decoded:  # a reply goes on under the budget granted before it
            self.pack_reply(packing, ready[:-1], end)
            self.wave(packing, ready[-1:], end, 0)
        elif ready:
            self.wave(packing, ready, end, 0)
        self.seen, self.waiting = end, (newest,)

    def pack_reply(self, packing: Packing, tokens: Sequence[int], end: int) -> None:
        """Put a reply's tokens but the last into a row: at once where none changes what is held for the next, else one by one."""
        if self.seen and tokens and self.protocol == "prompt" and self.cell.policy.replies_at_once:
            index = torch.tensor([packing.place(tokens, self.seen)])
            packing.jobs.append(Reply(index, self.cell, self.state))
        elif tokens:
            completes = 0 if self.protocol == "stream" else len(tokens)
            self.wave(packing, tokens, None if self.seen else end, completes)
        self.seen += len(tokens)

    def branch(self, count: int) -> Branch:
        """This session's part in a message of `count` tokens."""
        return Branch(self.cell, self.granted(self.seen + count), [0], self.state)

    def granted(self, tokens: int) -> Grants:
        """What the budget grants of `tokens`."""
        return Grants([(self.cell.policy.budget, tokens)])

    def conclude(self) -> None:
        """End a generated reply: take in its last token again, as the one at which the budget is granted anew and the policy acts."""
        packing = Packing()
        self.pack_end(packing)
        self.run(packing)

    def pack_end(self, packing: Packing) -> None:
        """Put what `conclude` takes in into a row."""
        if self.said is not None and not self.cell.policy.passive:
            token, held = self.said
            self.state, self.seen = State(dict(held), lasting=True), self.seen - 1
            self.wave(packing, [token], self.seen + 1, 0)
            self.seen += 1
        self.said = None

    def step(self, tokens: Sequence[int], basis: int | None, completes: int, length: int = 0) -> Tensor:
        """Take in tokens one by one under the policy; return the logits [1, V] after the last. `length` is `Engine.run`'s."""
        packing = Packing()
        self.wave(packing, tokens, basis, completes)
        packing.readout.add(len(packing.tokens) - 1, 0, 0)
        return self.engine.run(packing, length)

    def wave(self, packing: Packing, tokens: Sequence[int], basis: int | None, completes: int, *, answers: bool = False) -> None:
        """Put tokens into a row that go in one by one under the policy.

        `basis` tokens are what the budget is granted anew of; None: it stays as granted before.
        Tokens of `answers` are counted as reading, others as held once they are in.
        """
        index = torch.tensor([packing.place(tokens, self.seen)])
        sources = [(self.state, None)] if self.seen else []
        grants = None if basis is None else self.granted(basis)
        wave = Wave(index, [len(tokens)], self.cell, [0], sources, grants=grants, completes=completes, state=self.state)
        wave.paths = torch.ones_like(index) if answers else None
        packing.jobs.append(wave)

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

    def ask(self, answers: Sequence[Sequence[int]]) -> Scoring:
        """Score `answers` in one row after what is held."""
        self.rotate(*(self.seen + len(answer) for answer in answers))
        document = Document(self.waiting, tuple(tuple(answer) for answer in answers), self.seen, self.seen)
        scoring = Scoring(self.engine, [document], [self.cell], self.protocol)
        packing, asked = Packing(), scoring.work[0]
        if self.state.caches:
            packing.answers(
                [(Branch(self.cell, None, [0], self.state), asked)],
                stream=self.protocol == "stream",
            )
        else:
            packing.answers(packing.prompts([asked]), stream=self.protocol == "stream")
        scoring.settle(packing, self.engine.run(packing))
        return scoring

    def generate(self, limit: int, stop: Callable[[list[int]], bool], choose: Callable[[Tensor], int] | None = None) -> list[int]:
        """Say up to `limit` tokens, until `stop` of what was said; the last one said waits.

        `choose` picks a token from logits [V]; greedy decoding unless given.
        """
        said: list[int] = []
        while len(said) < limit:
            packing, start = Packing(), self.engine.counters.now()
            self.pack_step(packing)
            logits = self.engine.run(packing)
            token = int(logits[-1].argmax()) if choose is None else choose(logits[-1])
            self.engine.counters.said(start, [self.fed])
            self.waiting, self.fed = (token,), None
            said.append(token)
            if stop(said):
                break
        return said

    def pack_step(self, packing: Packing) -> None:
        """Put the token that waits into a row, as one of a reply; what is predicted after it is to wait in its place."""
        self.rotate(self.seen + 1, stepping=True)
        basis = None if self.seen else 0  # a prompt of one token has taken in none
        self.said = (self.waiting[0], dict(self.state.caches))
        self.wave(packing, self.waiting, basis, 0 if self.protocol == "stream" else 1, answers=True)
        packing.readout.add(len(packing.tokens) - 1, 0, 0)
        self.seen += 1
