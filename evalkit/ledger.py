"""Turns a run's tallies and counters into the `evalkit` record of a result; knows no model and no harness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .counters import Counters
from .documents import Document
from .errors import UsageError
from .pace import pace
from .policy import Policy
from .shares import QUANTITIES, acted, shares


def refuse_idle(policy: Policy, documents: Sequence[Document], tally: Tensor) -> None:
    """Raise UsageError when a policy that should have acted on these documents never did: its numbers would be the full cache's."""
    if policy.budget.whole or policy.passive or not documents or bool(acted(tally).any()):
        return
    name, longest = type(policy).__name__, max((document.basis for document in documents), default=0)
    if policy.budget.tokens is not None and policy.budget.tokens >= longest:
        raise UsageError(
            f"budget={policy.budget} is over every prompt (the longest has {longest} tokens before the one that waits), so {name} "
            "never acts: give fewer tokens or a share such as 0.1"
        )
    refuse_broken(policy, documents, tally)


def refuse_broken(policy: Policy, documents: Sequence[Document], tally: Tensor) -> None:
    """Raise UsageError when a policy did nothing on prompts that it says are long enough for it."""
    if policy.budget.whole or policy.passive or bool(acted(tally).any()):
        return
    name, able = type(policy).__name__, sum(policy.acts_on(document.basis) for document in documents)
    if able:
        raise UsageError(
            f"{name} at budget={policy.budget} did nothing on {able} prompts long enough for it to act: its result would be the "
            "full cache's; check the policy with `evalkit check`"
        )


PACED = ("decoded", "firsts", "steps")  # what a record's pace is read off


@dataclass
class Record:
    """What one task's requests cost under one cell."""

    documents: int = 0
    answers: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    computed_tokens: int = 0
    cells: int = 1  # how many cells shared the computed tokens and the seconds
    truncated: int = 0
    skipped: int = 0
    acted: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUANTITIES, 0.0))
    seconds: dict[str, float] = field(default_factory=dict)
    decoded: int = 0  # tokens said, while seconds of the phase decode went by
    firsts: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def add(self, documents: Sequence[Document], tally: Tensor) -> None:
        """Add documents and their tally [QUANTITIES, documents]."""
        self.documents += len(documents)
        self.answers += sum(len(document.answers) for document in documents)
        self.prompt_tokens += sum(len(document.prompt) for document in documents)
        self.answer_tokens += sum(len(answer) for document in documents for answer in document.answers)
        self.acted += int(acted(tally).sum())
        self.sums = {name: self.sums[name] + new for name, new in zip(QUANTITIES, tally.sum(1).tolist(), strict=True)}

    def spent(self, counters: Counters) -> None:
        """Add the tokens computed and said, the seconds by phase, and when tokens came."""
        self.computed_tokens += counters.tokens.get("computed", 0)
        self.decoded += counters.tokens.get("decoded", 0)
        self.firsts += counters.firsts
        self.steps += counters.steps
        for name, seconds in counters.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def costs(self) -> dict[str, Any]:
        """Return what was counted, seconds and computed tokens apart, which the cells of a pass share."""
        apart = ("seconds", "computed_tokens", "cells", *PACED)
        return {name: value for name, value in vars(self).items() if name not in apart}

    def as_dict(self) -> dict[str, Any]:
        """Return the record as it stands in a result."""
        plain = {name: value for name, value in vars(self).items() if name not in ("sums", "acted", "seconds", *PACED)}
        acted = self.acted / self.documents if self.documents else None
        return {
            **plain,
            **shares(self.sums),
            "acted": acted,
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "pace": pace(self.firsts, self.steps, self.seconds, self.prompt_tokens, self.decoded),
        }
