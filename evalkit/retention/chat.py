"""A conversation in a model's tokens, message by message, as its tokenizer's chat template frames them; knows no model and no facts.

Each message's tokens continue those before it, so that taking a conversation in by parts is taking it in whole. A template whose
text of the first messages changes with later ones cannot be followed so, and a plain one stands in, as for models without any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """What stands around the messages of a conversation."""

    opening: str  # before the first message, a system prompt within
    turn: str  # from a message to where the model takes over
    lead: str  # from there to a reply's text
    close: str  # what the model says to end a reply
    between: str  # from there to the next message
    plain: bool = False  # whether it is not the tokenizer's own


def plain(system: str | None) -> Frame:
    """Return the frame for models that know no chat."""
    return Frame(f"{system}\n\nUser: " if system else "User: ", "\nAssistant:", " ", "\n", "User: ", plain=True)


@dataclass(frozen=True)
class Chat:
    """A tokenizer and the frame that conversations get."""

    tokenizer: Any
    frame: Frame

    @classmethod
    def of(cls, tokenizer: Any, system: str | None = None) -> Chat:
        """Read the frame off a tokenizer's chat template; `system` stands before the first message."""
        return cls(tokenizer, framed(tokenizer, system) or plain(system))

    def user(self, text: str, *, first: bool) -> Tokens:
        """Return the tokens of a user's message, from the end of the reply before it to where the model takes over."""
        return self._encoded(self._before(first) + text.strip() + self.frame.turn, first)

    def where(self, text: str, part: str, *, first: bool) -> list[int]:
        """Return which of the tokens of `user(text)` have a letter of `part`, which the message holds."""
        whole = self._before(first) + text.strip() + self.frame.turn
        start = whole.index(part.strip(), len(self._before(first)))
        spans = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        stop, lead = start + len(part.strip()), len(self._begins) if first else 0
        return [lead + place for place, (low, high) in enumerate(spans) if low < stop and high > start]

    def reply(self, text: str) -> Tokens:
        """Return the tokens of an assistant's reply, with the one that ends it."""
        return self._encoded(self.frame.lead + text.strip() + self.frame.close, False)

    def answer(self, text: str) -> Tokens:
        """Return the tokens of the beginning of a reply, without an end."""
        return self._encoded(self.frame.lead + text.strip(), False)

    @cached_property
    def closing(self) -> Tokens:
        """The tokens that end a reply."""
        return self._encoded(self.frame.close, False)

    def closed(self, said: Sequence[int]) -> bool:
        """Whether a reply has come to its end."""
        if said[-1] in (self.closing[-1], self.tokenizer.eos_token_id):
            return True
        return self.frame.plain and "\n" in self.text(said)

    def text(self, said: Sequence[int]) -> str:
        """Return what a reply says."""
        decoded: str = self.tokenizer.decode(list(said), skip_special_tokens=True)
        return decoded.removesuffix(self.frame.close) if self.frame.close.strip() else decoded

    def _before(self, first: bool) -> str:
        return self.frame.opening if first else self.frame.between

    @cached_property
    def _begins(self) -> Tokens:
        """What the tokenizer puts before any text, where the frame does not."""
        bos = self.tokenizer.bos_token_id
        begins = bos is not None and list(self.tokenizer("a")["input_ids"][:1]) == [bos]
        return (bos,) if self.frame.plain and begins else ()

    def _encoded(self, text: str, first: bool) -> Tokens:
        return (*(self._begins if first else ()), *self.tokenizer(text, add_special_tokens=False)["input_ids"])


# For templates that tell the date (Llama's say this one where they know none): a run may last past midnight.
TODAY = date(2024, 7, 26)
MARKS = ("Where is the lamp?", "It is upstairs.", "Who put it there?", "The neighbour did.", "When was that?")


def framed(tokenizer: Any, system: str | None) -> Frame | None:
    """Return the frame of a tokenizer's template; None where it has none, or one that does not frame every message alike."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = _messages(tokenizer, system)
    whole, asked = _rendered(tokenizer, messages, False), _rendered(tokenizer, messages[: len(messages) - 4], True)
    places = [whole.find(mark) for mark in MARKS]
    if min(places) < 0 or places != sorted(places):
        return None
    parts = [whole[place + len(mark) : after] for place, mark, after in zip(places, MARKS, places[1:], strict=False)]
    opening, (middle, end) = whole[: places[0]], parts[:2]
    turn = asked.removeprefix(opening + MARKS[0])
    turn = turn if middle.startswith(turn) else middle
    alike = parts[2:] == [middle, end] and asked.startswith(opening + MARKS[0])
    again = opening + MARKS[0] + middle + MARKS[1] + end + MARKS[2]
    if not alike or not _rendered(tokenizer, messages[: len(messages) - 2], True).startswith(again):
        return None
    close = _first(tokenizer, end)
    return Frame(opening, turn, middle.removeprefix(turn), close, end.removeprefix(close))


def _messages(tokenizer: Any, system: str | None) -> list[Mapping[str, str]]:
    """Five messages of a conversation after the system prompt, which heads the first one where the template takes none."""
    roles = ("user", "assistant", "user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
    if system is None:
        return list(messages)
    told = [{"role": "system", "content": system}, *messages]
    try:
        if system in _rendered(tokenizer, told, False):
            return list(told)
    except Exception:  # templates raise their own errors for roles they do not know
        pass
    return [{"role": "user", "content": f"{system}\n\n{MARKS[0]}"}, *messages[1:]]


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt, strftime_now=TODAY.strftime
    )
    return text


def _first(tokenizer: Any, text: str) -> str:
    """The text of the first token of `text`, by which a reply ends."""
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text[: spans[0][1]] if spans else ""
