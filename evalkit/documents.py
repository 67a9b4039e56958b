"""What is asked: documents with answers, under which cell, and where in a row their predictions are read. Knows tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .memory import Cell
from .trie import Node, grow


@dataclass(frozen=True)
class Document:
    """A prompt and the answers to score after it, in tokens. The prompt's last token waits: it opens every answer."""

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    length: int | None = None  # tokens that the budget is a share of, where not the prompt's
    held: int | None = None  # tokens that a session took in before, in place of the prompt's

    @property
    def taken(self) -> tuple[int, ...]:
        """The prompt without the token that waits."""
        return self.prompt[:-1]

    @property
    def basis(self) -> int:
        """The tokens that the budget is a share of."""
        return len(self.taken) if self.length is None else self.length

    @property
    def start(self) -> int:
        """The position of the token that waits."""
        return len(self.taken) if self.held is None else self.held

    def tree(self) -> Node:
        """The answers' inputs as a tree: the waiting token, then each answer but its last token."""
        return grow([(self.prompt[-1], *answer[:-1]) for answer in self.answers]).children[0]


def shared(documents: Sequence[Document]) -> int:
    """How many tokens several prompts have in common at their beginnings, the waiting ones left out; 0 for a single one."""
    if len(documents) < 2:
        return 0
    least, most = min((d.taken for d in documents), default=()), max((d.taken for d in documents), default=())
    return next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), min(len(least), len(most)))


@dataclass(frozen=True)
class Asked:
    """A document's answers to be scored under one cell."""

    number: int  # its number in the tally, which all cells share
    document: Document
    cell: Cell
    slots: Sequence[int]  # where each answer's score goes

    def only(self, chosen: Sequence[int]) -> Asked:
        """Ask for the answers numbered `chosen` alone."""
        answers = tuple(self.document.answers[i] for i in chosen)
        return replace(self, document=replace(self.document, answers=answers), slots=[self.slots[i] for i in chosen])


@dataclass
class Readout:
    """Which places of the row predict which tokens, and to whose score each prediction belongs."""

    places: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, place: int, target: int, slot: int) -> None:
        self.places.append(place)
        self.targets.append(target)
        self.slots.append(slot)

    def sorted(self) -> tuple[list[int], list[int], list[int]]:
        """Return, for each prediction in the row's order, which of the places it is read at, its target and its score's slot."""
        order = sorted(range(len(self.places)), key=self.places.__getitem__)
        rank = {place: i for i, place in enumerate(dict.fromkeys(self.places[i] for i in order))}
        return [rank[self.places[i]] for i in order], [self.targets[i] for i in order], [self.slots[i] for i in order]
