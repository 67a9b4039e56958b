"""Several sessions under one policy that go on side by side, sharing rows; knows tokens, and neither text nor facts.

What each one holds and says is what it would alone; rows are shared, and by those that go on in step the layers' attention too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attention import follows_length
from .batch import Batch
from .cache import LayerCache
from .decoding import Wave
from .documents import Document
from .engine import Runner
from .memory import Branch, Cell, Grants, State
from .packing import Packing
from .policy import Policy
from .scoring import Score, Scoring
from .session import Session

Tokens = Sequence[int]
Stop = Callable[[list[int]], bool]


@dataclass
class Group:
    """Sessions of one engine under one policy."""

    engine: Runner
    sessions: list[Session]

    def feed(self, messages: Sequence[Tokens], *, decoded: bool = False) -> None:
        """Take in a message for each session, as `Session.feed` does."""
        start = self.engine.counters.now()
        self.take_in(messages, decoded=decoded)
        seconds = self.engine.counters.fed(start, decoded=decoded)
        for session in self.sessions:
            session.fed = seconds

    def take_in(self, messages: Sequence[Tokens], *, decoded: bool) -> None:
        """Do what `feed` does; the seconds are for others to count."""
        packing, told = Packing(), list(zip(self.sessions, messages, strict=True))
        if decoded and self.in_step(messages):
            self.replay(told)
            return
        for session, tokens in told:
            if self.alone or session.long(tokens, decoded=decoded):
                session.take_in(tokens, decoded=decoded)
            else:
                session.pack(packing, tokens, decoded=decoded)
        if packing.jobs:
            self.run(packing)

    @property
    def steps(self) -> bool:
        """Whether decoded tokens go in one by one."""
        return not (self.policy.passive or self.policy.replies_at_once)

    def in_step(self, replies: Sequence[Tokens]) -> bool:
        """Whether replies are to go in one by one, and can do so side by side."""
        able = not self.alone and "same_length" not in self.policy.needs and self.sessions[0].protocol == "prompt"
        begun = all(session.seen for session in self.sessions) and min(map(len, replies)) > 1
        return able and begun and self.steps and len(replies) > 1

    def replay(self, told: Sequence[tuple[Session, Tokens]]) -> None:
        """Take in replies in step, one token of each at a time: all but their last, then those, at which the policy acts."""
        packing, joint = Packing(), State(lasting=True)
        for session, _ in told:
            session.pack_end(packing)
        told = sorted(told, key=lambda pair: -len(pair[1]))
        ready = [(*session.waiting, *tokens[:-1]) for session, tokens in told]
        places = [packing.place(tokens, session.seen) for tokens, (session, _) in zip(ready, told, strict=True)]
        counts, documents = [len(tokens) - 1 for tokens in ready], [0] * len(told)
        index = torch.tensor([[0] * (counts[0] - len(own[:-1])) + own[:-1] for own in places])
        sources = [(session.state, None) for session, _ in told]
        packing.jobs.append(Wave(index, counts, self.cell, documents, sources, completes=counts[0], state=joint))
        ends = [(self.policy.budget, session.seen + len(tokens)) for tokens, (session, _) in zip(ready, told, strict=True)]
        last, ones = torch.tensor([own[-1:] for own in places]), [1] * len(told)
        packing.jobs.append(Wave(last, ones, self.cell, documents, [(joint, None)], grants=Grants(ends), state=joint))
        self.run(packing)
        for row, ((session, tokens), (_, end)) in enumerate(zip(told, ends, strict=True)):
            session.state.caches.update({layer: _alone(cache, row) for layer, cache in joint.caches.items()})
            session.seen, session.waiting = end, (tokens[-1],)

    @property
    def policy(self) -> Policy:
        return self.cell.policy

    @property
    def cell(self) -> Cell:
        return self.sessions[0].cell

    @property
    def alone(self) -> bool:
        """Whether sequences of unequal length must not share a row: their rotation hangs on it."""
        return follows_length(self.engine.model.config)

    def run(self, packing: Packing) -> Tensor:
        """Run a row; return the logits [W, V] at its readout's places."""
        return self.engine.run(packing)

    def generate(self, limit: int, stop: Stop) -> list[list[int]]:
        """Let every session say up to `limit` tokens greedily, each until `stop` of what it said; the last one said waits."""
        if self.alone:
            return [session.generate(limit, stop) for session in self.sessions]
        said = self.greedy(limit, stop, self.step_apart)
        for session, own in zip(self.sessions, said, strict=True):
            if own:
                session.waiting, session.fed = (own[-1],), None
        return said

    def answer(self, limit: int, stop: Stop) -> list[list[int]]:
        """Return what `generate` would; the sessions stay as they were. They are decoded as a batch wherever their policy allows it."""
        if self.alone or "same_length" in self.policy.needs or not all(session.seen for session in self.sessions):
            return Group(self.engine, [session.fork() for session in self.sessions]).generate(limit, stop)
        batch = Batch(self.engine, self.sessions)
        said = self.greedy(limit, stop, batch.step)
        batch.count()
        return said

    def greedy(self, limit: int, stop: Stop, step: Callable[[Sequence[int], Sequence[int]], list[int]]) -> list[list[int]]:
        """Return what the sessions say, each until `stop`: `step` feeds one token to each that is still going and returns their next."""
        said: list[list[int]] = [[] for _ in self.sessions]
        going = list(range(len(said)))
        while going and len(said[going[0]]) < limit:
            start = self.engine.counters.now()
            likeliest = step(going, [said[place][-1] if said[place] else self.sessions[place].waiting[-1] for place in going])
            self.engine.counters.said(start, [None if said[place] else self.sessions[place].fed for place in going])
            for place, token in zip(going, likeliest, strict=True):
                said[place].append(token)
            going = [place for place in going if not stop(said[place])]
        return said

    def step_apart(self, going: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Have each of the sessions that are `going` on take in a token, attending by itself; return the likeliest next ones."""
        packing = Packing()
        for place, token in zip(going, tokens, strict=True):
            self.sessions[place].waiting = (token,)
            self.sessions[place].pack_step(packing)
        return self.run(packing).argmax(-1).tolist()

    def score(self, answers: Sequence[Sequence[Tokens]]) -> list[list[Score]]:
        """Return how likely each of `answers`, some for each session, is to come next; the sessions stay as they were."""
        if self.alone or self.steps:  # trees of answers that step would each take a copy of what is held
            return [session.score(own) for session, own in zip(self.sessions, answers, strict=True)]
        documents = [
            Document(session.waiting, tuple(tuple(answer) for answer in own), session.seen, session.seen)
            for session, own in zip(self.sessions, answers, strict=True)
        ]
        protocol = self.sessions[0].protocol
        scoring = Scoring(self.engine, documents, [self.cell], protocol)
        asked = [work[0] for work in scoring.work]
        packing = Packing()
        packing.answers(
            [(Branch(self.cell, None, [0], session.state), [one]) for one, session in zip(asked, self.sessions, strict=True)],
            stream=protocol == "stream",
        )
        scoring.settle(packing, self.run(packing))
        return scoring.results()[0].scores


def _alone(cache: LayerCache, row: int) -> LayerCache:
    """One sequence of several, without the slots that only the others fill."""
    own = replace(cache.rows(slice(row, row + 1)), decoding=False)
    return replace(own, gaps=cache.layer.window is not None) if bool(own.filled.all()) else own.keep(own.filled)
