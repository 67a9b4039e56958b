"""What a run cost: tokens, seconds by phase, entries held and read, bytes, peak memory; knows no policy and no task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
        if isinstance(values, Tensor):
            self.pending[what].append((documents, values))
        else:
            known = self.known[what]
            for document in documents:
                known[document] += values

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
    """The whole run's counters."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds spent inside under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def count(self, name: str, number: int) -> None:
        """Count `number` tokens under `name`."""
        self.tokens[name] = self.tokens.get(name, 0) + number


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
