"""Who scores a sweep's packs: this process, several on this machine, or a Ray cluster; knows neither models nor packs.

A scorer is made by a callable that can be sent to where it works; it is made once there, as it holds a model, and when it is first
asked, so that what it refuses comes back to who asked.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any, Protocol, TypeVar

from .errors import UsageError

Key = TypeVar("Key")
Make = Callable[[], Any]
LOST = "a worker was lost, perhaps for want of memory; what was finished is kept: give the same command again, with fewer --jobs"


class Crew(Protocol):
    """Workers that hold a scorer each."""

    def call(self, method: str, *given: Any) -> Any:
        """Call a method of one scorer."""

    def scored(self, packs: Sequence[tuple[Key, Any]]) -> Iterator[tuple[Key, Any]]:
        """Score packs, each by one scorer; yield results as they come."""


Crews = Callable[[Make], Any]  # given how a scorer is made, a context manager that gives a Crew


@dataclass
class Alone:
    """This process."""

    scorer: Any

    def call(self, method: str, *given: Any) -> Any:
        return getattr(self.scorer, method)(*given)

    def scored(self, packs: Sequence[tuple[Key, Any]]) -> Iterator[tuple[Key, Any]]:
        return ((key, self.scorer.score(pack)) for key, pack in packs)


@contextmanager
def alone(make: Make) -> Iterator[Crew]:
    """Work in this process."""
    yield Alone(make())


@dataclass
class Processes:
    """Processes on this machine."""

    pool: ProcessPoolExecutor

    def call(self, method: str, *given: Any) -> Any:
        try:
            return self.pool.submit(_call, method, *given).result()
        except BrokenExecutor:
            raise UsageError(LOST) from None

    def scored(self, packs: Sequence[tuple[Key, Any]]) -> Iterator[tuple[Key, Any]]:
        waiting = {self.pool.submit(_call, "score", pack): key for key, pack in packs}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenExecutor:
            raise UsageError(LOST) from None
        finally:
            for future in waiting:
                future.cancel()


def processes(count: int) -> Crews:
    """Work in `count` processes, which share the machine's threads."""

    @contextmanager
    def crew(make: Make) -> Iterator[Crew]:
        threads = max(1, (os.cpu_count() or 1) // count)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, context, initializer=_start, initargs=(make, threads)) as pool:
            yield Processes(pool)

    return crew


_scorer: Make  # of a worker process


def _start(make: Make, threads: int) -> None:
    global _scorer
    _limit(threads)
    Thread(target=end_with_parent, daemon=True).start()
    _scorer = cache(make)


def end_with_parent() -> None:
    """A sweep that is killed outright cannot end its workers, which would keep their models in memory."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _call(method: str, *given: Any) -> Any:
    return getattr(_scorer(), method)(*given)


def _limit(threads: int) -> None:
    """Keep a worker from taking all threads of the machine."""
    import torch

    torch.set_num_threads(threads)


class Hand:
    """A scorer in a worker of a Ray cluster."""

    def __init__(self, make: Make, threads: int) -> None:
        _limit(threads)
        self.scorer = cache(make)

    def call(self, method: str, *given: Any) -> Any:
        return getattr(self.scorer(), method)(*given)


@dataclass
class Cluster:
    """Workers of a Ray cluster. A pack whose worker is lost goes to another one."""

    ray: Any
    hands: list[Any]

    def call(self, method: str, *given: Any) -> Any:
        while self.hands:
            try:
                return self.got(self.hands[0].call.remote(method, *given))
            except self.ray.exceptions.RayError:
                self.hands.pop(0)
        raise UsageError(LOST)

    def got(self, reference: Any) -> Any:
        """Return what a worker answered. Raises what the scorer raised there, and Ray's own errors where the worker was lost."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def scored(self, packs: Sequence[tuple[Key, Any]]) -> Iterator[tuple[Key, Any]]:
        left, busy, free = deque(packs), dict[Any, tuple[Any, tuple[Key, Any]]](), list(self.hands)
        while left or busy:
            while left and free:
                hand, task = free.pop(), left.popleft()
                busy[hand.call.remote("score", task[1])] = (hand, task)
            if not busy:
                raise UsageError(LOST)
            (done, *_), _ = self.ray.wait(list(busy))
            hand, task = busy.pop(done)
            try:
                result = self.got(done)
            except self.ray.exceptions.RayError:
                self.hands.remove(hand)
                left.appendleft(task)
                continue
            free.append(hand)
            yield task[0], result


def cluster(address: str, count: int | None) -> Crews:
    """Work in `count` workers of the Ray cluster at `address` (auto, host:port): unless given, one for each GPU, else for each node."""

    @contextmanager
    def crew(make: Make) -> Iterator[Crew]:
        try:
            import ray
        except ImportError:
            raise UsageError("--ray needs Ray: pip install 'kv-evalkit[ray]'") from None
        joined = not ray.is_initialized()
        try:
            if joined:
                _knock(address)
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            raise UsageError(
                f"--ray {address} cannot be reached ({' '.join(str(error).split())[:120]}): give a running cluster's"
            ) from None
        try:
            yield Cluster(ray, _hands(ray, make, count))
        finally:
            if joined:
                ray.shutdown()

    return crew


def _knock(address: str) -> None:
    """Raise OSError where nobody answers at host:port; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _hands(ray: Any, make: Make, count: int | None) -> list[Any]:
    """Start the workers, spread over the nodes."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    cores, gpus = ([int(node.get(kind, 0)) for node in nodes] for kind in ("CPU", "GPU"))
    number = count or sum(gpus) or len(nodes)
    if max(1, number) > (places := sum(gpus) or sum(cores)):
        raise UsageError(f"--jobs {number} is more than the cluster's {places} {'GPUs' if sum(gpus) else 'cores'}: give fewer")
    threads = max(1, min(cores) // math.ceil(number / len(nodes)))
    actor = ray.remote(num_cpus=threads, num_gpus=1 if sum(gpus) else 0, scheduling_strategy="SPREAD")(Hand)
    return [actor.remote(make, threads) for _ in range(number)]
