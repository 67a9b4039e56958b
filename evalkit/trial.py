"""A policy on trial: built at small budgets and run on documents drawn for it; knows the engine, and none of the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .attention import PreTrainedModel
from .documents import Document
from .errors import UsageError
from .model import tiny
from .packing import Packing
from .policy import PROTOCOLS, Policy
from .scoring import CellScores
from .session import Engine, Session

BUDGETS = ("10%", "12", "30%", "50%")  # the first two that a policy accepts are tried
VOCABULARY = 128
CLOSE = 1e-9  # log-probabilities that should be equal differ by rounding alone

Answers = list[list[float]]  # log-probabilities, document by document


def tokens(count: int, seed: int) -> tuple[int, ...]:
    """Return `count` different tokens: the keys of one token at two places would tie."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return tuple(order[:count].tolist())


@cache
def documents() -> tuple[Document, ...]:
    """Return prompts of 1 to 70 tokens, two of them alike for a while, with short and long answers."""
    shapes = ((70, (1, 4)), (1, (3,)), (24, (1, 1, 5)), (24, (1,)), (45, (2, 1)))
    drawn = [
        Document(tokens(length, seed), tuple(tokens(count, 100 + 10 * seed + i) for i, count in enumerate(answers)))
        for seed, (length, answers) in enumerate(shapes)
    ]
    drawn[4] = replace(drawn[4], prompt=drawn[0].prompt[:30] + drawn[4].prompt[30:])
    return tuple(drawn)


@dataclass(eq=False)
class Trial:
    """How to build a policy at a budget, the model to run it on, and what was scored so far."""

    build: Callable[[str], Policy]
    model: PreTrainedModel = field(default_factory=tiny)
    documents: Sequence[Document] = field(default_factory=documents)
    known: dict[tuple[Policy, str], CellScores] = field(default_factory=dict)

    def engine(self, **settings: Any) -> Engine:
        """Return a new engine on the model."""
        return Engine(self.model, calibration=lambda: tokens(VOCABULARY, 999), **settings)

    @cached_property
    def main(self) -> Engine:
        """The engine that all results come from unless something else is said."""
        return self.engine()

    @cached_property
    def whole(self) -> Policy:
        """The policy at a full budget."""
        return self.build("100%")

    @cached_property
    def policies(self) -> list[Policy]:
        """The policy at two budgets it accepts."""
        accepted = []
        for budget in BUDGETS:
            with suppress(UsageError):
                accepted.append(self.build(budget))
        if not accepted:
            raise UsageError(
                f"{type(self.whole).__name__} accepts none of the budgets {', '.join(BUDGETS)}, so nothing can be checked"
            )
        return accepted[:2]

    @property
    def small(self) -> Policy:
        """The policy at the first budget it accepts."""
        return self.policies[0]

    @cached_property
    def protocols(self) -> list[str]:
        """The protocols that the policy does not refuse."""
        return [protocol for protocol in PROTOCOLS if not refuses(self.whole, protocol)]

    def cases(self) -> Iterator[tuple[Policy, str]]:
        """The policy at the first budget it accepts, under each protocol."""
        return ((self.small, protocol) for protocol in self.protocols)

    def result(self, policy: Policy, protocol: str) -> CellScores:
        """Score all documents at once; computed once."""
        key = (policy, protocol)
        if key not in self.known:
            self.known[key] = self.main.score(self.documents, [policy], protocol)[0]
        return self.known[key]

    def scores(self, policy: Policy, protocol: str) -> Answers:
        """Return the log-probability of every answer, all documents scored at once."""
        return logprobs(self.result(policy, protocol))

    def predictions(self, policy: Policy, protocol: str, document: Document) -> Tensor:
        """Return the logits [T, V] before each of the T tokens of the document's only answer, scored in one row."""
        engine = Watched(self.model, calibration=self.main.calibration)
        engine.score([document], [policy], protocol)
        return engine.logits[-1]


@dataclass
class Watched(Engine):
    """An engine that notes every row's logits."""

    logits: list[Tensor] = field(default_factory=list)

    def run(self, packing: Packing, *given: Any) -> Tensor:
        self.logits.append(super().run(packing, *given))
        return self.logits[-1]


def refuses(policy: Policy, protocol: str) -> bool:
    """Whether the policy says that it cannot run under `protocol`."""
    try:
        policy.check(protocol)
    except UsageError:
        return True
    return False


def score(engine: Engine, asked: Sequence[Document], policy: Policy, protocol: str) -> Answers:
    """Return the log-probability of every answer."""
    return logprobs(engine.score(asked, [policy], protocol)[0])


def logprobs(result: CellScores) -> Answers:
    """Return the log-probabilities of a cell's answers."""
    return [[one.logprob for one in row] for row in result.scores]


def differ(one: Answers, other: Answers) -> str:
    """Return how far two runs are apart, if they are."""
    gaps = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in zip(one, other, strict=True)]
    return f"an answer of a document differs by {max(gaps):.1e}" if max(gaps) > CLOSE else ""


def one_by_one(engine: Engine, policy: Policy, protocol: str, document: Document, answer: Sequence[int]) -> float:
    """Return the log-probability of `answer`, each of its tokens a pass of its own; under stream each of the prompt's, too."""
    session, stream = engine.open(policy, protocol), protocol == "stream"
    if not stream:
        session.feed(document.prompt)
    logprob, line = 0.0, (*(document.prompt if stream else document.prompt[-1:]), *answer)
    for token, following in pairwise(line):
        logits = session.step([token], None if session.state.caches else document.basis, 0 if stream else 1)
        session.seen += 1
        if session.seen >= len(document.prompt):
            logprob += float(logits[-1].log_softmax(-1)[following])
    return logprob


def conversation(engine: Engine, policy: Policy, protocol: str) -> Iterator[Session]:
    """Yield a session after each message: a prompt, a reply taken in token by token, a message, a generated reply."""
    session = engine.open(policy, protocol)
    for count, decoded in ((20, False), (6, True), (12, False)):
        session.feed(tokens(count, 50 + count), decoded=decoded)
        yield session
    session.generate(3, lambda said: False)
    yield session
