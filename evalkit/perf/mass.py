"""How much of the full cache's attention falls on what a policy holds and reads, at one step; knows no policy by name.

The queries are the full cache's own. Shapes: H key/value heads, G queries per head, N tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from ..cache import LayerCache
from ..counters import Counters
from ..decoding import Wave
from ..kernels import Kernel
from ..packing import Packing
from ..session import Session


@dataclass
class Look:
    """What one step met in a layer."""

    kept: Tensor  # [H, 1 or G, N] whether the policy reads the token's entry
    weights: Tensor | None  # [H, G, N] how much each query attends to it, where every entry is there


@dataclass
class Looking(Wave):
    """A step that notes what it meets; it must be of one sequence and one token."""

    looks: list[Look] = field(default_factory=list)

    def step(
        self, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor, step: int, counters: Counters, kernel: Kernel
    ) -> tuple[LayerCache, Tensor]:
        self.looks.append(self.look(cache, query, cache.append(keys, values, decoding=True)))
        return super().step(cache, query, keys, values, step, counters, kernel)

    def look(self, cache: LayerCache, query: Tensor, grown: LayerCache) -> Look:
        """Note which of the entries the step reads, and how it attends to them."""
        policy, allowed = self.cell.policy, grown.visible(1)
        if policy.overrides("read") and (read := policy.read(cache, query)) is not None:
            allowed = allowed & torch.nn.functional.pad(read, (0, 1), value=True)
        allowed = allowed[0, :, :, 0].expand(grown.positions.shape[1], -1, -1)
        places = grown.positions[0].clamp(min=0)[:, None].expand_as(allowed)
        tokens = int(grown.seen)
        kept = torch.zeros(*allowed.shape[:2], tokens, dtype=torch.int, device=query.device)
        whole = policy.passive and grown.slots == tokens
        return Look(kept.scatter_add_(2, places, allowed.int()) > 0, grown.weights(query)[0, :, :, 0] if whole else None)


def looks(session: Session) -> list[Look]:
    """Return what the next step of a session's fork meets in each layer; nothing is counted of it."""
    fork, packing = session.fork(), Packing()
    fork.cell = replace(session.cell, tally=None)
    fork.pack_step(packing)
    (wave,) = packing.jobs
    looking = Looking(**{each.name: getattr(wave, each.name) for each in fields(Wave)})
    packing.jobs[0] = looking
    session.engine.run(packing)
    return looking.looks


def mass(full: Sequence[Look], other: Sequence[Look]) -> float:
    """Return the share of full's attention that falls on what the other one reads: the mean over layers and query heads."""
    shares = [(one.weights * own.kept).sum(-1).mean() for one, own in zip(full, other, strict=True) if one.weights is not None]
    return float(torch.stack(shares).mean())
