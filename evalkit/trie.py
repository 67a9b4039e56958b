"""A radix tree of token sequences, so that what sequences begin with in common is computed once; knows only integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Sequences = Sequence[Sequence[int]]


@dataclass
class Node:
    """Tokens that some sequences share after `depth` shared ones, then what each goes on with."""

    tokens: Sequence[int]
    depth: int
    ends: list[int] = field(default_factory=list)  # the sequences that end with this node's last token
    children: list[Node] = field(default_factory=list)

    @property
    def through(self) -> int:
        """How many sequences run through the node."""
        return len(self.ends) + sum(child.through for child in self.children)

    def walk(self) -> Iterator[Node]:
        """The node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def grow(sequences: Sequences, least: int = 1) -> Node:
    """Return the root of a tree in which beginnings of at least `least` tokens are shared; its own tokens are none."""
    root = Node((), 0, [i for i, sequence in enumerate(sequences) if not sequence])
    order = sorted((i for i, sequence in enumerate(sequences) if sequence), key=lambda i: tuple(sequences[i]))
    root.children = _split(sequences, order, 0, least)
    return root


def _split(sequences: Sequences, order: list[int], start: int, least: int) -> list[Node]:
    """Part `order` (sorted sequences, longer than `start`) into runs that go on alike for `least` tokens or more."""
    nodes: list[Node] = []
    while order:
        head = sequences[order[0]]
        shared, size = len(head) - start, 1
        for other in order[1:]:
            alike = _alike(head, sequences[other], start)
            if alike < least and not (alike == len(head) - start == len(sequences[other]) - start):
                break
            shared, size = min(shared, alike), size + 1
        run, order = order[:size], order[size:]
        end = start + shared
        node = Node(head[start:end], start, [i for i in run if len(sequences[i]) == end])
        node.children = _split(sequences, [i for i in run if len(sequences[i]) > end], end, least)
        nodes.append(node)
    return nodes


def _alike(one: Sequence[int], other: Sequence[int], start: int) -> int:
    """Return how many tokens from `start` on agree."""
    count = 0
    for a, b in zip(one[start:], other[start:], strict=False):
        if a != b:
            break
        count += 1
    return count
