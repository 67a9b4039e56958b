"""Conversations walked through under one policy: message by message, the fact asked for on forks. Knows no bucket and no file.

A fork is a conversation of its own, so one that is asked goes on exactly as one that never was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..cache import LayerCache
from ..counters import Counters, Tally
from ..documents import Document
from ..group import Group
from ..ledger import refuse_broken
from ..policy import Policy
from ..session import Engine, Session
from ..shares import QUANTITIES
from .chat import Chat, Tokens
from .protocol import Protocol
from .scores import contains, judged, rank
from .scripts import Script, Spoken, candidates, room, spoken

Query = dict[str, Any]


@dataclass
class Talk:
    """One conversation on its way."""

    script: Script
    spoken: Spoken
    session: Session
    open: bool = False  # whether a generated reply was cut off before its end
    statement: Sequence[int] = ()  # the positions of the fact's tokens
    told: Sequence[int] = ()  # and of the answer's in it
    restated: bool = False  # whether a generated reply has said the answer since it was told
    queries: list[Query] = field(default_factory=list)

    @property
    def place(self) -> int:
        """The position of the next token."""
        return self.session.seen + len(self.session.waiting)


@dataclass
class Walk:
    """What a walk needs: the model, how it is spoken to, and the protocol."""

    engine: Engine
    chat: Chat
    protocol: Protocol
    positions: int  # that the model has

    def through(self, scripts: Sequence[Script], policy: Policy, *, control: bool = False) -> list[list[Query]]:
        """Walk conversations side by side under a policy; return each one's queries. A control never tells the fact."""
        talks = [self.begun(script, policy, control) for script in scripts]
        number, going = 0, talks
        while going := [talk for talk in going if self.goes_on(talk, number)]:
            self.say(going, number)
            self.reply(going, number)
            number += 1
            for turn in self.protocol.turns:
                if asked := [talk for talk in going if talk.spoken.ends.get(turn) == number]:
                    self.ask(asked, turn)
        self.refuse_broken(policy, talks)
        return [talk.queries for talk in talks]

    def begun(self, script: Script, policy: Policy, control: bool) -> Talk:
        said = spoken(script, self.chat, self.protocol.inject_at, control=control)
        return Talk(script, said, self.engine.open(policy))

    def goes_on(self, talk: Talk, number: int) -> bool:
        """Whether there is a message that a query follows, and room for it, which generated replies may have used up."""
        if number >= max(talk.spoken.ends.values(), default=0):
            return False
        free = room(talk.script, talk.spoken, self.chat, self.protocol)
        return talk.place + len(talk.spoken.messages[number].user) + free <= self.positions

    def at_once(self, talks: Sequence[Talk]) -> bool:
        """Whether a message and its reply can be taken in together: the reply is known, and the policy does nothing in between."""
        return self.protocol.replies == "replay" and talks[0].session.cell.policy.passive

    def say(self, talks: Sequence[Talk], number: int) -> None:
        """Take in everyone's next message."""
        messages = [self.after(talk, talk.spoken.messages[number].user) for talk in talks]
        for talk, tokens in zip(talks, messages, strict=True):
            if talk.spoken.fact == number:
                message = talk.spoken.messages[number]
                start = talk.place + len(tokens) - len(message.user)
                talk.statement, talk.told = ([start + place for place in part] for part in (message.statement, message.told))
            talk.open = False
        if self.at_once(talks):
            messages = [(*said, *talk.spoken.messages[number].reply) for said, talk in zip(messages, talks, strict=True)]
        Group(self.engine, [talk.session for talk in talks]).feed(messages)

    def after(self, talk: Talk, tokens: Tokens) -> Tokens:
        """A message's tokens, with those that end a reply which was cut off."""
        return (*self.chat.closing, *tokens) if talk.open else tokens

    def reply(self, talks: Sequence[Talk], number: int) -> None:
        """Replay everyone's reply, or let the model give it; the fact's acknowledgement is never the model's."""
        if self.at_once(talks):
            return
        given = [talk for talk in talks if self.protocol.replies == "replay" or talk.spoken.fact == number]
        if given:
            group = Group(self.engine, [talk.session for talk in given])
            group.feed([talk.spoken.messages[number].reply for talk in given], decoded=True)
        if free := [talk for talk in talks if talk not in given]:
            said = Group(self.engine, [talk.session for talk in free]).generate(self.protocol.reply_cap, self.chat.closed)
            for talk, tokens in zip(free, said, strict=True):
                talk.open = not self.chat.closed(tokens)
                talk.restated |= bool(talk.statement) and contains(self.chat.text(tokens), talk.script.fact.answers)

    # Queries

    def ask(self, talks: Sequence[Talk], turn: int) -> None:
        """Ask for the fact on a fork of each conversation."""
        counters = self.engine.counters = Counters()
        start, forks = time.perf_counter(), [self.fork(talk.session) for talk in talks]
        places = [talk.place + talk.open * len(self.chat.closing) for talk in talks]
        group = Group(self.engine, forks)
        group.feed([self.after(talk, talk.spoken.questions[turn]) for talk in talks])
        contexts = [fork.seen + 1 for fork in forks]
        survived = [survivals(fork.caches, talk) for fork, talk in zip(forks, talks, strict=True)]
        scores = Group(self.engine, [self.bare(fork) for fork in forks]).score(
            [candidates(talk.script, self.chat) for talk in talks]
        )
        answers = group.answer(self.protocol.answer_cap, self.chat.closed)
        seconds = (time.perf_counter() - start) / len(talks)
        for i, talk in enumerate(talks):
            tally = forks[i].cell.tally
            assert tally is not None
            query = {
                "turn": turn,
                "question": talk.script.question(turn),
                "context_tokens": contexts[i],
                "distance_tokens": places[i] - max(talk.statement) if talk.statement else None,
                "restated": talk.restated,
                **self.judged(talk.script, answers[i], [score.logprob for score in scores[i]]),
                **survived[i],
                "tally": [round(value, 3) for value in tally.totals()[:, 0].tolist()],
                "seconds": round(seconds, 4),
                "ttft": round(counters.firsts[i], 5),
                "tpot": round(sum(counters.steps) / len(counters.steps), 5) if counters.steps else None,
            }
            talk.queries.append(query)

    def fork(self, session: Session) -> Session:
        """A fork whose costs are counted by themselves, from its question on."""
        fork = session.fork()
        fork.conclude()
        fork.cell = replace(session.cell, tally=Tally(1, self.engine.device))
        return fork

    @staticmethod
    def bare(session: Session) -> Session:
        """A fork that nothing is counted of."""
        fork = session.fork()
        fork.cell = replace(session.cell, tally=None)
        return fork

    def judged(self, script: Script, said: Sequence[int], logprobs: Sequence[float]) -> Query:
        """What the scorers say of an answer."""
        return {
            **judged(self.chat.text(said).strip(), script.fact.answers, script.fact.distractors, self.protocol.fuzzy),
            "rank": rank(logprobs),
            "logprobs": [round(logprob, 4) for logprob in logprobs],
        }

    def refuse_broken(self, policy: Policy, talks: Sequence[Talk]) -> None:
        """Raise UsageError for a policy that never did anything, although it says that it could have."""
        queries = [query for talk in talks for query in talk.queries]
        documents = [Document((0,), (), length=query["context_tokens"] - 1) for query in queries]
        tallies = torch.tensor([query["tally"] for query in queries], dtype=torch.float64).view(-1, len(QUANTITIES))
        refuse_broken(policy, documents, tallies.T)


def survivals(caches: Sequence[LayerCache], talk: Talk) -> Query:
    """The shares of the fact's own entries that are still held: of the statement in all, by layer and head, and of the answer in it."""
    if not talk.statement:
        return {"survival": None, "survival_told": None, "survival_heads": None}
    heads = [list(_held(cache, talk.statement)) for cache in caches]
    told = [share for cache in caches for share in _held(cache, talk.told)]
    every = [share for layer in heads for share in layer]
    return {
        "survival": round(sum(every) / len(every), 6),
        "survival_told": round(sum(told) / len(told), 6),
        "survival_heads": [[round(share, 4) for share in layer] for layer in heads],
    }


def _held(cache: LayerCache, places: Sequence[int]) -> Iterator[float]:
    """The share of some positions that each head of a conversation's layer holds."""
    wanted = torch.tensor(places, device=cache.positions.device)
    for positions, filled in zip(cache.positions[0], cache.filled[0], strict=True):
        yield float(torch.isin(wanted, positions[filled]).double().mean())
