"""Entries that live in host memory and come to the device when they are read; knows neither positions nor policies.

On CUDA the host's memory is pinned, and what is stored and fetched travels on streams of its own. On the CPU a second arena stands for
the host: the same bytes are copied, and counted alike. Shapes are those of `entries`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .entries import Arena, Entries, Holding, Plain

Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass
class Host:
    """The host's memory and the ways there and back; counts bytes as they really lie, not at 2 an element."""

    stored: int = 0  # bytes brought to the host
    fetched: int = 0  # bytes brought to the device
    streams: dict[tuple[torch.device, str], torch.cuda.Stream] = field(default_factory=dict, repr=False)

    def as_dict(self) -> dict[str, int]:
        """Return the bytes that were really copied."""
        return {"to_host_bytes": self.stored, "to_device_bytes": self.fetched}

    def store(self, rest: Plain, keys: Tensor, values: Tensor) -> tuple[Plain, torch.cuda.Event | None]:
        """Put keys and values behind what is there; return all of it, and on CUDA what tells that they have arrived."""
        self.stored += keys.nbytes + values.nbytes
        if keys.device.type != "cuda":
            return rest.append(keys, values), None
        with self.beside(keys.device, "store") as stream:
            stream.wait_stream(torch.cuda.default_stream(keys.device))
            for tensor in (keys, values):
                tensor.record_stream(stream)  # its memory is not to be used anew before it was read
            return rest.append(keys, values), stream.record_event()

    def fetch(self, pair: Pair, device: torch.device) -> Pair:
        """Bring keys and values, which no one else holds or which are copied next, to the device."""
        self.fetched += sum(tensor.nbytes for tensor in pair)
        if device.type != "cuda":
            return pair
        with self.beside(device, "fetch") as stream:
            keys, values = (tensor.pin_memory().to(device, non_blocking=True) for tensor in pair)
        torch.cuda.default_stream(device).wait_stream(stream)
        self.hand(device, keys, values)
        return keys, values

    @contextmanager
    def ahead(self, device: torch.device, ready: torch.cuda.Event) -> Iterator[None]:
        """Queue what is done inside beside all that the CUDA device was given after `ready`; what it is given next waits for it."""
        with self.beside(device, "fetch") as stream:
            stream.wait_event(ready)
            yield
        torch.cuda.default_stream(device).wait_stream(stream)

    def hand(self, device: torch.device, *tensors: Tensor | None) -> None:
        """Tell CUDA that tensors made on a stream of ours are used on the device's own: their memory is not free before that is done."""
        for tensor in tensors if device.type == "cuda" else ():
            if tensor is not None:
                tensor.record_stream(torch.cuda.default_stream(device))

    @contextmanager
    def beside(self, device: torch.device, way: str) -> Iterator[torch.cuda.Stream]:
        """Queue what is done inside on the stream of a CUDA device that is for one way."""
        if (device, way) not in self.streams:
            self.streams[device, way] = torch.cuda.Stream(device)
        with torch.cuda.stream(self.streams[device, way]):
            yield self.streams[device, way]


@dataclass(frozen=True, eq=False)
class Hosted(Entries):
    """Entries in host memory, but for the newest, which stay on the device until they are stored with the rest."""

    rest: Plain  # in host memory
    newer: Plain | None  # on the device
    device: torch.device
    host: Host
    arrived: torch.cuda.Event | None = None  # on CUDA: when what was stored last is in host memory

    away = True

    @classmethod
    def of(cls, entries: Entries, host: Host) -> Hosted:
        """Store all of `entries`; what several cells hold alike is stored once."""
        if isinstance(entries, Hosted):
            return entries.settled()
        keys, values = entries.dense()
        arena = entries.arena if isinstance(entries, Plain) else None
        if arena is not None and isinstance(arena.twin, Hosted) and arena.twin.host is host and arena.twin.slots == keys.shape[2]:
            return arena.twin
        found = cls(room(keys, values), Plain.of(keys, values), keys.device, host).settled()
        if arena is not None:
            arena.twin = found
        return found

    @property
    def slots(self) -> int:
        """S."""
        return self.rest.length + (self.newer.length if self.newer else 0)

    def settled(self) -> Hosted:
        """Store what is on the device still."""
        if self.newer is None or not self.newer.length:
            return self
        self.wait()  # the host's memory may have to be moved
        rest, arrived = self.host.store(self.rest, *self.newer.dense())
        return Hosted(rest, None, self.device, self.host, arrived)

    def wait(self) -> None:
        """Wait until what was stored is there: what comes after may be done by the host itself."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def dense(self) -> Pair:
        self.wait()
        held = self.rest.dense()
        if self.newer is None or self.device.type == "cuda":  # else what they are put together to is a copy, too
            held = held[0].clone(), held[1].clone()
        keys, values = self.host.fetch(held, self.device)
        if self.newer is None:
            return keys, values
        newer = self.newer.dense()
        return torch.cat([keys, newer[0]], dim=2), torch.cat([values, newer[1]], dim=2)

    def newest(self, count: int) -> Pair:
        return super().newest(count) if self.newer is None or self.newer.length < count else self.newer.newest(count)

    def chosen(self, order: Tensor) -> Pair:
        """As `Entries.chosen`, of entries that are stored: the others are on the device."""
        slots = order.cpu()
        self.wait()
        return self.host.fetch(self.rest.chosen(slots), self.device)

    @property
    def size(self) -> int:
        return self.rest.size

    @property
    def dtype(self) -> torch.dtype:
        return self.rest.dtype

    def append(self, keys: Tensor, values: Tensor) -> Hosted:
        newer = Plain.of(keys, values) if self.newer is None else self.newer.append(keys, values)
        return Hosted(self.rest, newer, self.device, self.host, self.arrived)

    def take(self, order: Tensor) -> Hosted:
        settled, slots = self.settled(), order.cpu()
        settled.wait()
        return settled.held(settled.rest.take(slots))

    def rows(self, index: Tensor | slice) -> Hosted:
        settled = self.settled()
        settled.wait()
        return settled.held(settled.rest.rows(index.cpu() if isinstance(index, Tensor) else index))

    def stack(self, others: Sequence[Entries], lead: Sequence[int]) -> Hosted:
        every = [Hosted.of(other, self.host) for other in others]
        for other in every:
            other.wait()
        return self.held(every[0].rest.stack([other.rest for other in every], lead))

    def held(self, rest: Plain) -> Hosted:
        """Hold what lies in the host's memory."""
        return Hosted(rest, None, self.device, self.host)

    def holding(self, counts: Tensor) -> Holding[Tensor]:
        return self.rest.holding(counts)


def room(keys: Tensor, values: Tensor) -> Plain:
    """Return room in host memory for keys and values [B, H, S, D], and for as much again as decoding adds before it is moved."""
    pinned, slots = keys.device.type == "cuda", keys.shape[2] + keys.shape[2] // 4 + 16
    own = [
        torch.empty((*tensor.shape[:2], slots, tensor.shape[3]), dtype=tensor.dtype, pin_memory=pinned) for tensor in (keys, values)
    ]
    return Plain(Arena(own[0], own[1], used=0), 0)
