"""Has the conversations of a retention test with a chat server, whatever its cache does; knows no model, no policy and no folder.

A question is sent with all messages before it, and neither it nor its answer is sent again: that is the fork.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isnan
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ..errors import UsageError
from ..fetch import tokenizer
from ..plan import PolicyChoice
from ..spread import Crew, Crews, Key, Make
from .address import Address
from .chat import Chat
from .client import Message, Server
from .protocol import Bucket, Protocol, load
from .run import CONTROL, Cells, Retention, prepared, with_control
from .scores import contains, judged
from .scripts import Casting, Pack, Script, Spoken, room, spoken

Query = dict[str, Any]

LABEL = "endpoint"
CONCURRENCY = 4
LETTERS = 4  # of a token, where its length is estimated
SERVERS = ("label", "tokenizer", "concurrency", "timeout", "patience")  # flags that say how a server is asked
OURS = ("policy", "budget", "dtype", "together", "prefill_chunk", "jobs")  # and those that say how evalkit's own cache is run
UNSEEN = ("rank", "logprobs", "survival", "survival_told", "survival_heads", "tally")  # what a server does not show


# What is asked for


def job(given: Mapping[str, Any]) -> Retention:
    """Return the test that the command line asks for: of a server where it names one, else of a model that evalkit runs.

    `given` has every flag by its name, None for those that were left out. Raises UsageError for flags that do not go together.
    """
    flags = {name: value for name, value in given.items() if name not in ("out", "protocol", "jobs", "endpoint", *SERVERS)}
    if given["endpoint"] is not None:
        return _served(given, flags)
    if stray := _flags(given, SERVERS):
        raise UsageError(f"{stray} says how a server is asked: give --endpoint http://HOST:PORT/v1 too, or leave it out")
    return prepared(given["protocol"], given["out"], flags, given["jobs"] or 1)


def _flags(given: Mapping[str, Any], names: Sequence[str]) -> str:
    """Those of some flags that were given, as they are typed."""
    return ", ".join(f"--{name}" for name in names if given[name] is not None)


def _served(given: Mapping[str, Any], flags: Mapping[str, str | None]) -> Retention:
    if stray := _flags(given, OURS):
        raise UsageError(f"{stray} cannot go with --endpoint, whose server has a cache of its own: leave it out (--label names it)")
    label = LABEL if given["label"] is None else given["label"].strip()
    if label.lower() in ("", CONTROL) or not label.isprintable():
        raise UsageError(f"--label {label!r} is no name for what is served: give a line of text other than {CONTROL}")
    protocol = served(load(given["protocol"], flags), label)
    address = Address.of(given["endpoint"])
    if protocol.model is None:
        raise UsageError(f"--endpoint needs --model: give a name that {address.url}/models lists")
    patient = {name: given[name] for name in ("timeout", "patience") if given[name] is not None}
    for name, seconds in patient.items():
        if isnan(seconds):
            raise UsageError(f"--{name} nan is no time: give seconds")
    server, crews = Server(address, protocol.model, **patient), threads(given["concurrency"] or CONCURRENCY)
    return Retention(protocol, given["out"], crews, lambda asked: partial(Caller, server, given["tokenizer"], asked), cells)


def served(protocol: Protocol, label: str) -> Protocol:
    """Return a protocol whose one policy is the server's, unknown but for its label; a record holds one conversation."""
    return protocol.model_copy(update={"policies": (PolicyChoice(name=label),), "budgets": (), "dtype": None, "together": 1})


def cells(protocol: Protocol) -> Cells:
    """Return the cell that is served, and the control."""
    (policy,) = protocol.policies
    return with_control(protocol, [{"label": policy.name, "policy": policy.name, "budget": None, "knobs": {}, "control": False}])


# The conversations


class Estimate:
    """Stands in for a tokenizer that is not at hand: a text has a token for every four characters."""

    chat_template = bos_token_id = eos_token_id = None

    def __call__(self, text: str, **asked: Any) -> dict[str, list[Any]]:
        """Return tokens that say nothing, and the places of their characters."""
        spans = [(start, min(start + LETTERS, len(text))) for start in range(0, len(text), LETTERS)]
        return {"input_ids": [0] * len(spans), "offset_mapping": spans}


@dataclass
class Talk:
    """One conversation on its way."""

    script: Script
    spoken: Spoken
    messages: list[Message]
    place: int = 0  # of the next token
    statement: int | None = None  # the place of the last token of the fact
    restated: bool = False  # whether a generated reply has said the answer since it was told
    queries: list[Query] = field(default_factory=list)


class Caller:
    """A chat server in the place of a model."""

    def __init__(self, server: Server, tokens: str | None, protocol: Protocol) -> None:
        """Take a server, and the name or folder of its model's tokenizer, without which lengths are estimated."""
        self.server, self.tokens, self.protocol = server, tokens, protocol
        self.chat = Chat.of(tokenizer(tokens) if tokens else Estimate(), protocol.system)
        self.told = server.positions()
        self.positions = self.told or sys.maxsize

    def described(self) -> dict[str, Any]:
        """Return what identifies the server, and what lengths are counted in."""
        name = self.tokens and (Path(self.tokens).resolve().name if Path(self.tokens).is_dir() else self.tokens)
        lengths = f"tokens of {name}" if name else f"an estimate, {LETTERS} characters a token"
        return {"endpoint": self.server.address.url, "lengths": lengths, "positions": self.told}

    @cached_property
    def casting(self) -> Casting:
        """The conversations and facts to choose from."""
        return Casting.of(self.protocol, self.chat, self.positions)

    def scripts(self, bucket: Bucket) -> list[Script]:
        """Choose a bucket's conversations."""
        return self.casting.scripts(bucket)

    def score(self, pack: Pack) -> list[list[Query]]:
        """Have a pack's conversations; return each one's queries."""
        return [self.through(script, control=pack.cell.control) for script in pack.scripts]

    def through(self, script: Script, *, control: bool) -> list[Query]:
        """Have a conversation to its last query, or as far as the model's positions reach; return its queries."""
        asked = self.protocol
        said = spoken(script, self.chat, asked.inject_at, control=control)
        talk = Talk(script, said, [] if asked.system is None else [{"role": "system", "content": asked.system}])
        last = max(said.ends.values(), default=0)
        for number, exchange in enumerate(script.told(asked.inject_at, control=control)[:last]):
            if talk.place + len(said.messages[number].user) + room(script, said, self.chat, asked) > self.positions:
                break
            self.exchange(talk, number, *exchange)
            talk.queries += [self.query(talk, turn) for turn, end in said.ends.items() if end == number + 1]
        return talk.queries

    def exchange(self, talk: Talk, number: int, user: str, reply: str) -> None:
        """Say the next message and have it replied to: by the server, or as the source has it; a fact's reply is always given."""
        message = talk.spoken.messages[number]
        if number == talk.spoken.fact:
            talk.statement = talk.place + max(message.statement)
        talk.messages.append({"role": "user", "content": user.strip()})
        if self.protocol.replies == "generate" and number != talk.spoken.fact:
            reply = self.server.chat(talk.messages, self.protocol.reply_cap, self.protocol.seed).text
            talk.restated |= talk.statement is not None and contains(reply, talk.script.fact.answers)
        talk.messages.append({"role": "assistant", "content": reply.strip()})
        talk.place += len(message.user) + len(self.chat.reply(reply))

    def query(self, talk: Talk, turn: int) -> Query:
        """Ask for the fact, beside the conversation."""
        question = talk.script.question(turn)
        asked = [*talk.messages, {"role": "user", "content": question}]
        answer = self.server.chat(asked, self.protocol.answer_cap, self.protocol.seed)
        counted, fact = "tokenizer" if self.tokens else "estimate", talk.script.fact
        return {
            "turn": turn,
            "question": question,
            "context_tokens": answer.prompt_tokens or talk.place + len(talk.spoken.questions[turn]),
            "counted": "server" if answer.prompt_tokens else counted,
            "distance_tokens": None if talk.statement is None else talk.place - talk.statement,
            "restated": talk.restated,
            **judged(answer.text.strip(), fact.answers, fact.distractors, self.protocol.fuzzy),
            **dict.fromkeys(UNSEEN),
            "seconds": round(answer.seconds, 4),
        }


# Side by side


@dataclass
class Threads:
    """Threads of this process that share a scorer which mostly waits. They end with the process, whatever they wait for."""

    scorer: Any
    count: int

    def call(self, method: str, *given: Any) -> Any:
        return getattr(self.scorer, method)(*given)

    def scored(self, packs: Sequence[tuple[Key, Any]]) -> Iterator[tuple[Key, Any]]:
        waiting, done = SimpleQueue[tuple[Key, Any]](), SimpleQueue[tuple[Key, Any]]()
        for pack in packs:
            waiting.put(pack)
        for _ in range(min(self.count, len(packs))):
            Thread(target=self.work, args=(waiting, done), daemon=True).start()
        left, failed = len(packs), None
        try:
            while left:
                (key, found), left = done.get(), left - 1
                if isinstance(found, Exception):  # what the others are at is not lost by it
                    failed = failed or found
                    left -= _dropped(waiting)
                else:
                    yield key, found
        finally:
            _dropped(waiting)
        if failed:
            raise failed

    def work(self, waiting: SimpleQueue[tuple[Key, Any]], done: SimpleQueue[tuple[Key, Any]]) -> None:
        """Score packs until none is waiting, or one fails."""
        while True:
            try:
                key, pack = waiting.get_nowait()
            except Empty:
                return
            try:
                done.put((key, self.scorer.score(pack)))
            except Exception as error:
                done.put((key, error))
                return


def _dropped(waiting: SimpleQueue[Any]) -> int:
    """Empty a queue; return how many were in it."""
    dropped = 0
    with suppress(Empty):
        while True:
            waiting.get_nowait()
            dropped += 1
    return dropped


def threads(count: int) -> Crews:
    """Work in `count` threads of this process."""

    @contextmanager
    def crew(make: Make) -> Iterator[Crew]:
        yield Threads(make(), count)

    return crew
