"""What sequences take in blocks of equal size, and what those save that begin alike; knows only integers.

As vLLM stores them (Kwon et al., arXiv 2309.06180): a sequence fills all of its blocks but the last, and a full block belongs to every
sequence whose tokens agree up to the block's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .errors import UsageError
from .formats import Section, Word

BLOCK = 16  # tokens; vLLM's own default


@dataclass(frozen=True)
class Paged:
    """Sequences in blocks of `block` tokens."""

    block: int
    sequences: int
    tokens: int  # of all sequences
    alone: int  # blocks, where each sequence has its own
    together: int  # blocks, where full ones are shared

    @property
    def waste(self) -> int:
        """The slots that stand empty at the sequences' ends: as many whether full blocks are shared or not."""
        return self.alone * self.block - self.tokens

    @property
    def saved(self) -> int:
        """The blocks that sharing saves."""
        return self.alone - self.together

    def as_dict(self, entry: float) -> dict[str, int]:
        """Return counts and bytes, where a token takes `entry` bytes in all layers together."""
        slots = {"stored": self.tokens, "paged": self.alone * self.block, "shared": self.together * self.block, "waste": self.waste}
        return {**vars(self), "waste": self.waste, **{f"{name}_bytes": round(count * entry) for name, count in slots.items()}}


def paged(sequences: Iterable[Sequence[int]], block: int = BLOCK) -> Paged:
    """Store sequences of tokens, all at once, in blocks of `block` tokens. Raises UsageError for blocks of less than one.

    A sequence is what is held once a prompt was taken in. The token that waits is no part of it: vLLM, too, computes a prompt's last
    token even where all that comes before is there.
    """
    if block < 1:
        raise UsageError(f"block={block} is not allowed: give the tokens of a block, 1 or more")
    known: dict[tuple[int, tuple[int, ...]], int] = {}  # full blocks, by the one before and their tokens -> their numbers
    lengths = []
    for sequence in sequences:
        before = 0
        for start in range(0, len(sequence) // block * block, block):
            before = known.setdefault((before, tuple(sequence[start : start + block])), len(known) + 1)
        lengths.append(len(sequence))
    partial = sum(length % block > 0 for length in lengths)
    return Paged(block, len(lengths), sum(lengths), sum(blocks(length, block) for length in lengths), len(known) + partial)


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


def compared(stored: Paged, entry: float, held: Mapping[str, float]) -> Section:
    """Put the full cache in one piece, in blocks and in shared blocks beside what policies hold, in bytes, by their labels."""
    bytes_of = stored.as_dict(entry)
    ways = {"in one piece": "stored", f"in blocks of {stored.block}": "paged", f"in shared blocks of {stored.block}": "shared"}
    lines = {f"full, {way}": float(bytes_of[f"{what}_bytes"]) for way, what in ways.items()} | dict(held)
    whole = max(1, bytes_of["stored_bytes"])
    rows = [[Word(label), Word(f"{count:,.0f}"), Word(f"{100 * count / whole:.1f} %")] for label, count in lines.items()]
    note = f"{stored.sequences} prompts of {stored.tokens:,} tokens together; the last block of each stands empty in part."
    return Section("paged", 3, ["cache", "bytes", "of full"], rows, [note])
