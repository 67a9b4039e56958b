"""What sequences take in blocks of equal size, and what those save that begin alike; knows only integers.

As vLLM stores them (Kwon et al., arXiv 2309.06180): a sequence fills all of its blocks but the last, and a full block belongs to every
sequence whose tokens agree up to the block's end. A block that a layer's sliding window has passed is free again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .errors import UsageError

BLOCK = 16  # tokens; vLLM's own default


@dataclass
class Paged:
    """Sequences that are held all at once, in blocks of `block` tokens, where a layer looks back over `window` tokens or all.

    A sequence is what is held once a prompt was taken in. The token that waits is no part of it: vLLM, too, computes a prompt's last
    token even where all that comes before is there.
    """

    block: int = BLOCK
    window: int | None = None
    sequences: int = 0
    tokens: int = 0  # of all sequences, but for those that the window has passed
    alone: int = 0  # blocks, where each sequence has its own
    partial: int = 0  # of them not full, so never shared
    known: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict, repr=False)  # (block before, tokens) -> number
    full: set[int] = field(default_factory=set, repr=False)  # numbers of the full blocks that are not passed in every sequence

    def __post_init__(self) -> None:
        if self.block < 1:
            raise UsageError(f"block={self.block} is not allowed: give the tokens of a block, 1 or more")

    def add(self, sequence: Sequence[int]) -> None:
        """Hold one more sequence of tokens."""
        length, before = len(sequence), 0
        live = length if self.window is None else min(length, self.window)
        first = (length - live) // self.block  # block with a token that is not passed
        for number in range(length // self.block):
            own = tuple(sequence[number * self.block : (number + 1) * self.block])
            before = self.known.setdefault((before, own), len(self.known) + 1)
            if number >= first:
                self.full.add(before)
        self.sequences += 1
        self.tokens += live
        self.alone += blocks(length, self.block) - first
        self.partial += length % self.block > 0

    @property
    def together(self) -> int:
        """The blocks, where full ones are shared."""
        return len(self.full) + self.partial

    @property
    def waste(self) -> int:
        """The slots that stand empty at the sequences' ends: as many whether full blocks are shared or not."""
        return self.alone * self.block - self.tokens

    @property
    def saved(self) -> int:
        """The blocks that sharing saves."""
        return self.alone - self.together


def paged(sequences: Iterable[Sequence[int]], block: int = BLOCK, window: int | None = None) -> Paged:
    """Store sequences of tokens in blocks of `block`. Raises UsageError for blocks of less than one token."""
    found = Paged(block, window)
    for sequence in sequences:
        found.add(sequence)
    return found


@dataclass
class Stored:
    """Sequences in all layers of a model; `token_bytes` says what a token takes in those with a sliding window, and in those without."""

    token_bytes: Mapping[int | None, int]
    block: int = BLOCK

    def __post_init__(self) -> None:
        self.tokens = 0  # of all sequences
        self.layers = [(Paged(self.block, window), size) for window, size in self.token_bytes.items()]

    def add(self, sequences: Iterable[Sequence[int]]) -> None:
        """Hold more sequences of tokens."""
        for sequence in sequences:
            self.tokens += len(sequence)
            for layers, _ in self.layers:
                layers.add(sequence)

    def as_dict(self) -> dict[str, int]:
        """Return counts, and the bytes in one piece, in blocks, in shared blocks and of empty slots."""
        total = lambda slots: sum(slots(layers) * size for layers, size in self.layers)  # noqa: E731
        return {
            "block": self.block,
            "sequences": self.layers[0][0].sequences,
            "tokens": self.tokens,
            "stored_bytes": total(lambda layers: layers.tokens),
            "paged_bytes": total(lambda layers: layers.alone * self.block),
            "shared_bytes": total(lambda layers: layers.together * self.block),
            "waste_bytes": total(lambda layers: layers.waste),
        }


def blocks(tokens: int, block: int) -> int:
    """Return how many blocks a sequence of `tokens` takes."""
    return -(-tokens // block)


def slack(tokens: int, block: int, window: int | None = None) -> tuple[float, int]:
    """Return how many slots of a sequence's blocks stand empty: on average over lengths around `tokens`, and at worst.

    A block that a sliding `window` has passed is free again; one that it has passed in part is not.
    """
    if window is None or tokens <= window:
        return (block - 1) / 2, block - 1
    return block - 1, ((window + block - 2) // block + 1) * block - window
