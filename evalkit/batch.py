"""Decodes sequences as a batch, from where sessions are, and leaves those as they are; knows tokens, and no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .counters import Tally
from .decoding import Wave
from .engine import Runner
from .memory import State
from .packing import Packing
from .session import Session


class Batch:
    """What sessions under one policy would go on with, a token of each at a time, their caches side by side: copies of what they hold.

    A sequence that has ended stays beside the others until at most half of them are going on, since leaving it out copies theirs.
    """

    def __init__(self, engine: Runner, sessions: Sequence[Session]) -> None:
        """Start from sessions that all have taken something in."""
        self.engine, self.sessions, cell = engine, sessions, sessions[0].cell
        self.tally = None if cell.tally is None else Tally(len(sessions), engine.device)
        self.cell, self.stream = replace(cell, tally=self.tally), sessions[0].protocol == "stream"
        self.places = list(range(len(sessions)))  # of the sequences side by side, their numbers
        self.seen = [session.seen for session in sessions]
        self.sources: list[tuple[State, Tensor | None]] = [(session.state, None) for session in sessions]

    def step(self, going: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Take in a token of each of the sequences that are `going` on, in order; return the likeliest next ones."""
        if 2 * len(going) <= len(self.places):
            kept = [row for row, place in enumerate(self.places) if place in going]
            self.places, self.sources = list(going), [(state, torch.tensor(kept)) for state, _ in self.sources]
        says, packing, state = dict(zip(going, tokens, strict=True)), Packing(), State(lasting=True)
        ended = [0], 0  # a token and a position that every model knows: nobody asks what comes of them
        index = torch.tensor(
            [packing.place(*(([says[place]], self.seen[place]) if place in says else ended)) for place in self.places]
        )
        paths = torch.tensor([[int(place in says)] for place in self.places])
        lengths, completes = [1] * len(index), 0 if self.stream else 1
        packing.jobs.append(
            Wave(index, lengths, self.cell, self.places, self.sources, completes=completes, paths=paths, state=state)
        )
        for row, place in enumerate(self.places):
            if place in says:
                self.seen[place] += 1
                packing.readout.add(row, 0, 0)
        self.sources = [(state, None)]
        return self.engine.run(packing).argmax(-1).tolist()

    def count(self) -> None:
        """Count for each session what was read."""
        if self.tally is None:
            return
        for session, own in zip(self.sessions, self.tally.totals().T.tolist(), strict=True):
            assert session.cell.tally is not None
            for what, total in enumerate(own):
                session.cell.tally.add(what, [0], total)
