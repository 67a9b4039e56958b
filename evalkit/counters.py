"""What a run cost: tokens, seconds by phase, entries held and read, bytes, peak memory; knows no policy and no task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor

from .shares import QUANTITIES


class Tally:
    """Sums over layers and heads for each of a number of documents under one cell; what lies on the device stays there until asked."""

    def __init__(self, documents: int, device: torch.device) -> None:
        self.known = [[0.0] * documents for _ in QUANTITIES]
        self.sums = torch.zeros(len(QUANTITIES), documents, dtype=torch.float64, device=device)
        self.pending: list[list[tuple[Sequence[int], Tensor]]] = [[] for _ in QUANTITIES]

    def add(self, what: int, documents: Sequence[int], values: Tensor | float) -> None:
        """Add `values`, one for each of the documents (a tensor [B]) or one for all, to the documents numbered `documents`."""
        if isinstance(values, float):
            known = self.known[what]
            for document in documents:
                known[document] += values
        else:
            self.pending[what].append((documents, values))

    def totals(self) -> Tensor:
        """Return the sums, [QUANTITIES, documents]."""
        for what, pending in enumerate(self.pending):
            if pending:
                where = torch.tensor([document for documents, _ in pending for document in documents], device=self.sums.device)
                values = torch.cat([values.to(self.sums.device, self.sums.dtype) for _, values in pending])
                self.sums[what].index_add_(0, where, values)
                pending.clear()
        return self.sums + torch.tensor(self.known, dtype=torch.float64, device=self.sums.device)


@dataclass
class Counters:
    """The whole run's counters. On CUDA, where work is only queued, phases are seconds of the host unless it waits for the device."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    firsts: list[float] = field(default_factory=list)  # seconds from a prompt's or message's start to its first answer token
    steps: list[float] = field(default_factory=list)  # seconds of each later step of decoding, which says a token of every sequence
    waits_for: torch.device | None = None  # the CUDA device whose work each phase waits for: exact, and slower

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Count the seconds spent inside a `with` block under `name`."""
        return _Phase(self, name)

    def now(self) -> float:
        """Return the time in seconds, once the device has done what it was given where that is waited for."""
        if self.waits_for is not None:
            torch.cuda.synchronize(self.waits_for)
        return time.perf_counter()

    def spent(self, name: str, start: float) -> float:
        """Count the seconds since `start` under `name`; return them."""
        seconds = self.now() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        return seconds

    def count(self, name: str, number: int) -> None:
        """Count `number` tokens under `name`."""
        self.tokens[name] = self.tokens.get(name, 0) + number

    def fed(self, start: float, *, decoded: bool) -> float | None:
        """Count a prompt or message taken in since `start`; return the seconds, None for a reply that counts as decoded."""
        seconds = self.spent("replay" if decoded else "prefill", start)
        return None if decoded else seconds

    def said(self, start: float, fed: Sequence[float | None]) -> None:
        """Count a step of decoding begun at `start`, which said a token of each sequence.

        `fed`: the seconds that taking in what a sequence answers to took, if this token is its first since then; None for later ones.
        """
        seconds = self.spent("decode", start)
        self.count("decoded", len(fed))
        self.firsts += [before + seconds for before in fed if before is not None]
        if None in fed:
            self.steps.append(seconds)


class _Phase:
    """A stretch of time under way: a class, since a generator takes twice as long in every layer of every step."""

    __slots__ = ("counters", "name", "start")

    def __init__(self, counters: Counters, name: str) -> None:
        self.counters, self.name = counters, name

    def __enter__(self) -> None:
        self.start = self.counters.now()

    def __exit__(self, *error: object) -> None:
        self.counters.spent(self.name, self.start)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the process's peak resident bytes and, on CUDA, the peak bytes allocated and reserved."""
    peak = {"host_peak_bytes": _peak_resident()}
    if device.type == "cuda":
        peak["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        peak["device_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return peak


def _peak_resident() -> int:
    try:
        import resource
    except ImportError:  # Windows keeps the peak elsewhere
        return int(psutil.Process().memory_info().peak_wset)
    scale = 1 if psutil.MACOS else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
