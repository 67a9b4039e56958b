"""What a policy is: a budget and up to four answers about a cache; knows no model, no task and no single policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field
from torch import Tensor

from .budget import WHOLE, Budget
from .cache import LayerCache
from .entries import Holding
from .errors import UsageError, nearest
from .layer import Head, exact
from .marks import NOTHING, Marks
from .masks import additive, at_least, counts
from .masks import highest as top

Natural = Annotated[int, Field(ge=0)]  # the knobs' types: 0, 1, 2, ...
Positive = Annotated[int, Field(ge=1)]  # 1, 2, 3, ...
Share = Annotated[float, Field(gt=0, le=1)]  # above 0, at most 1
Presets = Mapping[str, Mapping[str, Any]]

PROTOCOLS = ("prompt", "stream")
QUESTIONS = ("read", "observe", "write", "evict", "place", "within")


class Model(Protocol):
    """What `prepare` may ask of the model: how it attends on a calibration text."""

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        """Return each attention layer's queries [1, H, G, T, D] and keys [1, H, T, D], rotated, on the text."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The full cache. A policy overrides only the questions it answers differently.

    A policy is frozen: what it learns about a sequence lives in the cache, as marks and notes, so forks never share state. Inside
    a layer the order is read, attend, observe, write, evict, so nothing leaks from the future. While a prompt is taken in block by
    block only `observe` is asked; `write` and `evict` follow when it is whole, and at every decoded token.
    """

    budget: Budget = WHOLE

    paper: ClassVar[str] = ""
    presets: ClassVar[Presets] = MappingProxyType({})  # deviations, by name: policy:preset
    needs: ClassVar[frozenset[str]] = frozenset()  # guess · rope · prepare · received · whole_prompt · same_length
    host: ClassVar[bool] = False  # entries live in host memory and are fetched when read
    at_once: ClassVar[bool] = False  # `read` takes many queries at once: entries alone decide, not what other queries read
    answers: ClassVar[bool] = False  # whether it answers any question itself: found once for a class, as it is asked in every layer

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.answers = any(getattr(cls, name) is not getattr(Policy, name) for name in QUESTIONS)

    def prepare(self, model: Model) -> list[Mapping[str, Tensor]]:
        """Learn about each layer of a model, once; a cache carries its layer's part as `cache.prepared`."""
        return []

    def read(self, cache: LayerCache, query: Tensor) -> Tensor | None:
        """Return which held slots each query may read, [B, H, 1 or G, T, S]; None: all. Asked before the new tokens are there.

        A policy that needs "guess" goes by `cache.guess` alone: it may be asked, and what it reads fetched, before the layer begins.
        There is one query a sequence, T = 1, unless the policy declares `at_once`. `cache.open()` says what may be chosen from.
        """
        return None

    def observe(self, cache: LayerCache, query: Tensor) -> LayerCache:
        """Note what the new tokens' queries [B, H, G, T, D] say about entries; must not depend on the budget."""
        return cache

    def write(self, cache: LayerCache) -> LayerCache:
        """Store new entries in another form, once they have attended."""
        return cache

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        """Forget (or merge) entries, last of all."""
        return cache

    def place(self, cache: LayerCache) -> Tensor | None:
        """Return the positions [B, H, S] that held keys are to be rotated to for the next query, which sits at `seen`."""
        return None

    def within(self, cache: LayerCache, query: Tensor) -> Tensor | None:
        """Return what a block's own T tokens read while it is taken in, [B, H, 1 or G, T, S], later tokens known; None: all.

        For published harnesses that simulate a policy on prompt and answer in one pass (needs "whole_answer"); asked once the
        block is there. What a token may see of its future is masked in any case.
        """
        return None

    @property
    def passive(self) -> bool:
        """Whether nothing is ever asked of this policy."""
        return not self.answers

    @property
    def lossless(self) -> bool:
        """Whether it must compute what the full cache computes: its budget is everything."""
        return self.budget.whole

    @property
    def static(self) -> bool:
        """Whether decoded tokens change nothing that is held or read until a message is complete."""
        return self.passive

    @property
    def replies_at_once(self) -> bool:
        """Whether a replayed reply's tokens, all but its last, can be taken in together: none changes what another holds or reads."""
        if self.overrides("place"):
            return False
        lasting = self.overrides("write") or self.overrides("evict")
        return (self.static and not self.overrides("read")) or (self.at_once and not lasting)

    def overrides(self, question: str) -> bool:
        """Whether this policy answers `question` itself."""
        return getattr(type(self), question) is not getattr(Policy, question)

    def statistic(self) -> Policy:
        """Return the policy less what `observe` does not depend on: cells that agree share one observation."""
        return replace(self, budget=WHOLE)

    def acts_on(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` is long enough for the policy to do anything at its budget and settings."""
        return self.budget.allowance(tokens) < tokens

    @property
    def floor(self) -> int:
        """The least entries it holds or reads of a sequence, however small the budget: a page, a group, a window that it needs."""
        return 1

    @property
    def observed(self) -> int:
        """How many of a prompt's last queries the policy looks at together: they arrive in one block."""
        return 1

    def holding(self, head: Head, tokens: int) -> Holding[int]:
        """Return what a head holds of a prompt of `tokens` once the policy has acted, as its cache will count it.

        This is the allowance where entries are forgotten, else every entry. A policy that keeps another number, stores entries in
        another form or notes something says so here.
        """
        entries = head.live(tokens)
        if self.overrides("evict"):
            entries = min(entries, self.budget.allowance(tokens, head.layer.window))
        return Holding(entries, entries * head.size)

    def fetched(self, head: Head, tokens: int) -> int:
        """Return how many of a head's entries a query brings from host memory, at most."""
        return head.live(tokens) if self.host else 0

    def check(self, protocol: str) -> None:
        """Raise UsageError when the policy cannot run under `protocol`, or there is no such protocol."""
        if protocol not in PROTOCOLS:
            raise UsageError(f"protocol={protocol} is not known{nearest(protocol, PROTOCOLS)}: give {' or '.join(PROTOCOLS)}")
        if protocol == "stream" and {"whole_prompt", "whole_answer"} & self.needs:
            raise UsageError(
                f"{type(self).__name__} is defined on a whole prompt and cannot run under protocol=stream: use protocol=prompt"
            )

    @property
    def knobs(self) -> dict[str, Any]:
        """The policy's parameters but the budget, as they are set."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "budget"}


# The words that masks are made of


def first(cache: LayerCache, count: Tensor | int) -> Tensor:
    """[B, H, S] the entries of the sequence's first `count` tokens (a number, or one for each sequence)."""
    return cache.filled & (cache.positions < _each(count))


def last(cache: LayerCache, count: Tensor | int) -> Tensor:
    """[B, H, S] the entries of the sequence's newest `count` tokens (a number, or one for each sequence)."""
    return cache.filled & (cache.positions >= cache.seen[:, None, None] - _each(count))


def granted(cache: LayerCache) -> Tensor:
    """[B] the entries the budget grants each head; all of them under a full budget."""
    return cache.tokens if cache.allowance is None else cache.allowance


def _each(count: Tensor | int) -> Tensor | int:
    return count[:, None, None] if isinstance(count, Tensor) else count


__all__ = [
    "NOTHING", "Budget", "Head", "Holding", "LayerCache", "Marks", "Model", "Natural", "Policy", "Positive", "Presets", "Share", "additive",
    "at_least", "counts", "exact", "first", "granted", "last", "top",
]  # fmt: skip
