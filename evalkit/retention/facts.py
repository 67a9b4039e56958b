"""The facts that are told and asked for; knows no conversation but its words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..errors import UsageError
from ..rooms import room
from .scores import normalised


@dataclass(frozen=True)
class Fact:
    """Something told once, with the questions that ask for it, the accepted answers, and what else the answer might have been."""

    id: str
    kind: str
    statement: str
    acknowledgement: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    distractors: tuple[str, ...]

    @cached_property
    def words(self) -> tuple[str, ...]:
        """What must not occur in a conversation that the fact is told in."""
        return tuple(f" {normalised(text)} " for text in (*self.answers, *self.distractors))

    def collides(self, text: str) -> bool:
        """Whether a normalised text has one of the answers or distractors in it."""
        said = f" {text} "
        return any(word in said for word in self.words)

    @property
    def told(self) -> str:
        """The accepted answer as the statement has it."""
        return next(answer for answer in self.answers if answer.lower() in self.statement.lower())


def load(path: Path | None = None) -> list[Fact]:
    """Return the facts of a file, those that ship with evalkit unless given."""
    path = path or room("retention") / "facts.jsonl"
    return list(_read(path))


def _read(path: Path) -> Iterator[Fact]:
    reader = TypeAdapter(Fact)
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            yield reader.validate_json(line)
        except ValidationError:
            names = ", ".join(field.name for field in fields(Fact))
            raise UsageError(f"{path}, line {number}: no fact: give a JSON object with {names}") from None
