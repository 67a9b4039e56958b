"""Which conversations fill a bucket, and which fact is told in each; knows lengths in tokens, and no model.

A conversation whose length fits is taken as it is. Where a source has too few, turns are merged (several exchanges count as one) and
conversations are joined (the beginnings of several, in equal shares, one after the other); each script says which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import Literal

from ..errors import UsageError
from . import facts, sources
from .chat import Chat, Tokens
from .facts import Fact
from .protocol import Asking, Bucket, Protocol
from .scores import normalised
from .sources import Conversation

Making = Literal["whole", "merged", "joined"]
TRIES = 40  # draws for each conversation that is wanted, before a source counts as too small


@dataclass(frozen=True)
class Script:
    """A conversation to be had: its exchanges up to the last query, and the fact told in it."""

    id: str
    making: Making
    sources: tuple[str, ...]
    exchanges: tuple[tuple[str, str], ...]
    asked: tuple[int, ...]  # the turns after which there is a query, in order; the exchanges make as many turns as the last of them
    fact: Fact
    phrasing: int = 0  # of the fact's questions, the one that is asked first

    @property
    def turns(self) -> int:
        """How many turns the exchanges make, as equal in number of exchanges as can be."""
        return self.asked[-1]

    def end(self, turn: int) -> int:
        """Return how many exchanges there were when a turn has ended."""
        return turn * len(self.exchanges) // self.turns

    def question(self, turn: int) -> str:
        """Return what is asked after a turn; the phrasings take turns, from query to query and from conversation to conversation."""
        return self.fact.questions[(self.phrasing + self.asked.index(turn)) % len(self.fact.questions)]

    def told(self, inject_at: int, *, control: bool) -> list[tuple[str, str]]:
        """Return all exchanges, the fact told before turn `inject_at`, or left out of a control."""
        texts = list(self.exchanges)
        if not control:
            texts.insert(self.end(inject_at - 1), (self.fact.statement, self.fact.acknowledgement))
        return texts


@dataclass(frozen=True)
class Pack:
    """Scripts to be walked side by side under a cell."""

    scripts: Sequence[Script]
    cell: Asking


@dataclass(frozen=True)
class Draft:
    """Exchanges that may become a script."""

    making: Making
    sources: tuple[str, ...]
    exchanges: tuple[tuple[str, str], ...]
    beyond: int = 0  # tokens of the conversation after them

    @cached_property
    def words(self) -> str:
        """All that is said, normalised."""
        return normalised("\n".join(part for exchange in self.exchanges for part in exchange))


@dataclass
class Casting:
    """Conversations and facts on their way into buckets."""

    protocol: Protocol
    chat: Chat
    conversations: Sequence[Conversation]
    facts: Sequence[Fact]
    positions: int  # that the model has

    @classmethod
    def of(cls, protocol: Protocol, chat: Chat, positions: int) -> Casting:
        """Return what a protocol's source has, and the facts that ship with evalkit."""
        found = sources.load(protocol.source, protocol.language, max(protocol.turns))
        return cls(protocol, chat, found, facts.load(), positions)

    def __post_init__(self) -> None:
        self.size = lru_cache(maxsize=None)(self._size)

    @property
    def last(self) -> int:
        """The turn of the last query."""
        return max(self.protocol.turns)

    def scripts(self, bucket: Bucket) -> list[Script]:
        """Return a bucket's scripts; fewer than asked for where the source has no more. Raises UsageError where it has none."""
        if bucket[0] + self.protocol.headroom > self.positions:
            raise UsageError(
                f"bucket={bucket} with headroom={self.protocol.headroom} does not fit the model's {self.positions} positions: "
                "give shorter ones"
            )
        draw = Random(f"{self.protocol.seed} {bucket}")
        facts, found, taken = draw.sample(list(self.facts), len(self.facts)), list[Script](), set[tuple[str, ...]]()
        for draft in self.drafts(bucket, draw):
            if draft.sources in taken:
                continue
            script = self.paired(draft, facts, bucket, len(found))
            if script and self.fits(script, bucket, draft.beyond):
                facts.remove(script.fact)
                facts.append(script.fact)  # the one told last is told again last
                found.append(script)
                taken.add(script.sources)
            if len(found) == self.protocol.conversations:
                break
        if not found:
            raise UsageError(
                f"source={self.protocol.source} fills no conversation of {self.last} turns into bucket={bucket}: give other buckets, "
                "fewer turns or another source"
            )
        return found

    def drafts(self, bucket: Bucket, draw: Random) -> Iterator[Draft]:
        """Yield what may fill a bucket: conversations as they are, then with merged turns, then joined."""
        able = [one for one in self.conversations if len(one.exchanges) >= self.last]
        for one in draw.sample(able, len(able)):
            beyond = one.exchanges[self.last :] if self.protocol.bucket_by == "conversation" else ()
            yield Draft("whole", (one.id,), one.exchanges[: self.last], sum(map(self.size, beyond)))
        for one in draw.sample(able, len(able)):
            count = self.reaching(one.exchanges, draw.uniform(*bucket))
            if count > self.last:
                yield Draft("merged", (one.id,), one.exchanges[:count])
        for _ in range(TRIES * self.protocol.conversations):
            if joined := self.joined(draw.uniform(*bucket), draw):
                yield joined

    def joined(self, target: float, draw: Random) -> Draft | None:
        """Join the beginnings of as many conversations as it takes, two at least, in equal shares until they reach `target` tokens."""
        order, parts, whole = draw.sample(list(self.conversations), len(self.conversations)), list[Conversation](), 0
        while order and (len(parts) < 2 or whole < target):
            parts.append(order.pop())
            whole += sum(map(self.size, parts[-1].exchanges))
        shares, tokens = [0] * len(parts), 0
        while len(parts) > 1 and (tokens < target or sum(shares) < self.last):
            open_ = [place for place, part in enumerate(parts) if shares[place] < len(part.exchanges)]
            if not open_:
                return None
            least = min(open_, key=shares.__getitem__)
            tokens += self.size(parts[least].exchanges[shares[least]])
            shares[least] += 1
        exchanges = tuple(exchange for part, share in zip(parts, shares, strict=True) for exchange in part.exchanges[:share])
        return Draft("joined", tuple(part.id for part in parts), exchanges) if len(parts) > 1 else None

    def reaching(self, exchanges: Sequence[tuple[str, str]], target: float) -> int:
        """Return how many of the exchanges it takes to reach `target` tokens; all where they do not."""
        tokens = 0
        for count, exchange in enumerate(exchanges):
            if tokens >= target:
                return count
            tokens += self.size(exchange)
        return len(exchanges)

    def paired(self, draft: Draft, facts: Sequence[Fact], bucket: Bucket, number: int) -> Script | None:
        """Tell the first fact of which nothing occurs in the conversation's own words; None where every one does."""
        fact = next((fact for fact in facts if not fact.collides(draft.words)), None)
        if fact is None:
            return None
        return Script(f"{bucket}/{number:04d}", draft.making, draft.sources, draft.exchanges, self.protocol.turns, fact, number)

    def fits(self, script: Script, bucket: Bucket, beyond: int) -> bool:
        """Whether a script's length lies in the bucket, and its context leaves the headroom."""
        context = spoken(script, self.chat).context(script.turns)
        if not bucket[0] <= context + beyond < bucket[1]:
            return False
        return context + max(self.protocol.headroom, longest(script, self.chat, self.protocol)) <= self.positions

    def _size(self, exchange: tuple[str, str]) -> int:
        """The tokens of an exchange, but at a conversation's beginning."""
        return len(self.chat.user(exchange[0], first=False)) + len(self.chat.reply(exchange[1]))


# In tokens


@dataclass(frozen=True)
class Message:
    """A user's message and the reply that the source has, in tokens."""

    user: Tokens
    reply: Tokens
    statement: tuple[int, ...] = ()  # of the user's tokens, those that state the fact
    told: tuple[int, ...] = ()  # and those of the answer in it


@dataclass(frozen=True)
class Spoken:
    """A script in a model's tokens."""

    messages: tuple[Message, ...]
    questions: dict[int, Tokens]  # after a turn
    ends: dict[int, int]  # how many messages there were at a turn's end
    fact: int | None  # which message tells it; None in a control

    def context(self, turn: int) -> int:
        """Return how many tokens there are before the answer to a turn's question, all replies as the source has them."""
        return len(self.questions[turn]) + sum(len(one.user) + len(one.reply) for one in self.messages[: self.ends[turn]])


def spoken(script: Script, chat: Chat, inject_at: int = 1, *, control: bool = False) -> Spoken:
    """Return a script in tokens, its fact told before turn `inject_at` and asked for from there on, or left out of a control."""
    turns = [turn for turn in script.asked if turn >= inject_at]
    place, texts = script.end(inject_at - 1), script.told(inject_at, control=control)
    messages = [Message(chat.user(user, first=not number), chat.reply(reply)) for number, (user, reply) in enumerate(texts)]
    if not control:
        where: Callable[[str], tuple[int, ...]] = lambda part: tuple(chat.where(script.fact.statement, part, first=not place))  # noqa: E731
        telling = messages[place]
        messages[place] = Message(telling.user, telling.reply, where(script.fact.statement), where(_as_told(script.fact)))
    return Spoken(
        tuple(messages),
        {turn: chat.user(script.question(turn), first=False) for turn in turns},
        {turn: script.end(turn) + (not control) for turn in turns},
        None if control else place,
    )


def candidates(script: Script, chat: Chat) -> list[Tokens]:
    """Return the replies that are compared by likelihood: the answer, then each distractor, with the reply's end."""
    return [(*chat.answer(text), *chat.closing[:1]) for text in (script.fact.answers[0], *script.fact.distractors)]


def longest(script: Script, chat: Chat, protocol: Protocol) -> int:
    """Return how many tokens may follow a question: of an answer, or of those that are compared."""
    return max(protocol.answer_cap, *map(len, candidates(script, chat)))


def room(script: Script, said: Spoken, chat: Chat, protocol: Protocol) -> int:
    """Return the positions that have to be free after a user's message: the headroom (what is replayed was chosen to fit), or all that a
    generated reply and a query after it may take.
    """
    if protocol.replies == "replay":
        return protocol.headroom
    question = max(map(len, said.questions.values()))
    return max(protocol.headroom, protocol.reply_cap + len(chat.closing) + question + longest(script, chat, protocol))


def _as_told(fact: Fact) -> str:
    """The answer as it stands in the statement, letter by letter."""
    start = fact.statement.lower().index(fact.told.lower())
    return fact.statement[start : start + len(fact.told)]
