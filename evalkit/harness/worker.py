"""One model with its tokenizer, ready to encode requests and to score packs under many cells; knows no task and no store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..counters import Counters
from ..documents import Document, shared
from ..ledger import Record, refuse_broken
from ..model import digest
from ..policies import build
from ..requests import Request, gathered
from .model import PolicyLM
from .tasks import Item

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Ready:
    """One document's requests in a model's tokens: prompt and answer each."""

    doc_id: int
    requests: tuple[tuple[Tokens, Tokens], ...]

    @property
    def longest(self) -> Tokens:
        """The longest prompt."""
        return max((prompt for prompt, _ in self.requests), key=len)


@dataclass(frozen=True)
class Encoded:
    """A task's documents in a model's tokens, how many of its requests were cut or left out for their length, and what tokens take."""

    documents: list[Ready]
    truncated: int
    skipped: int
    token_bytes: Mapping[int | None, int]  # of all layers with a sliding window of so many tokens, and of those without

    @property
    def prefix(self) -> int:
        """How many tokens all prompts begin with."""
        return shared([Document(prompt, ()) for ready in self.documents for prompt, _ in ready.requests])


@dataclass(frozen=True)
class Asking:
    """A cell as it is asked for: the policy's name and knobs, and the budget."""

    policy: str
    budget: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    row_tokens: int = 1024


@dataclass(frozen=True)
class Pack:
    """Documents of one task to be scored under cells in one pass."""

    task: str
    documents: Sequence[Ready]
    cells: Sequence[Asking]
    protocol: str
    prefix: int = 0  # tokens that all prompts of the task begin with


@dataclass(frozen=True)
class Answered:
    """What one cell answers to a pack: log-probabilities and greedy flags, document by document, and what it cost."""

    logprobs: list[list[float]]
    greedy: list[list[bool]]
    costs: dict[str, Any]


@dataclass(frozen=True)
class Scored:
    """What all cells answer to a pack, the seconds by phase and the tokens computed."""

    cells: list[Answered]
    seconds: dict[str, float]
    computed: int


class Worker:
    """A model at work on packs."""

    def __init__(self, name: str, args: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Load the model called `name` with lm-eval's `args`; `settings` are evalkit's own: overlength, attn, prefill_chunk, offload."""
        self.lm = PolicyLM(name, policy="full", **args, **settings)

    def described(self) -> dict[str, Any]:
        """Return what identifies the model and where it runs."""
        engine = self.lm.engine
        return {
            "folder": Path(str(self.lm.pretrained)).name,
            "digest": digest(engine.model),
            "dtype": str(self.lm.model.dtype).removeprefix("torch."),
            "device": engine.device.type,
            "attn": engine.attn,
            "positions": int(self.lm.max_length),
        }

    def encoded(self, items: Sequence[Item]) -> Encoded:
        """Tokenise a task's documents as lm-eval does, and check them."""
        requests = [
            Request(number, item.task, *self.lm.paired(context, continuation), f"{item.task} document {item.doc_id}")
            for number, (item, context, continuation) in enumerate((item, *pair) for item in items for pair in item.requests)
        ]
        record = Record()
        left = {request.number: request for request in self.lm.admit(requests, record)}
        documents, number = [], 0
        for item in items:
            own = [left.get(number + place) for place in range(len(item.requests))]
            number += len(own)
            if pairs := tuple((request.prompt, request.answer) for request in own if request is not None):
                documents.append(Ready(item.doc_id, pairs))
        return Encoded(documents, record.truncated, record.skipped, self.lm.token_bytes)

    def score(self, pack: Pack) -> Scored:
        """Score a pack's documents under all its cells, each prompt taken in once for those that share rows of one size."""
        asked = [
            [
                Request(number, pack.task, prompt, answer, f"{pack.task} document {ready.doc_id}")
                for prompt, answer in ready.requests
            ]
            for number, ready in enumerate(pack.documents)
        ]
        requests = [replace(request, number=number) for number, request in enumerate(chain.from_iterable(asked))]
        documents, where = gathered(requests)
        places = iter(where[request.number] for request in requests)
        spots = [[next(places) for _ in own] for own in asked]
        counters = self.lm.engine.counters = Counters()
        answered: dict[int, Answered] = {}
        with counters.phase("total"):
            for rows in dict.fromkeys(cell.row_tokens for cell in pack.cells):
                turns = [turn for turn, cell in enumerate(pack.cells) if cell.row_tokens == rows]
                answered |= zip(turns, self._answered(pack, [pack.cells[turn] for turn in turns], documents, spots), strict=True)
        seconds = {name: round(value, 4) for name, value in counters.seconds.items()}
        return Scored([answered[turn] for turn in range(len(pack.cells))], seconds, counters.tokens.get("computed", 0))

    def _answered(
        self, pack: Pack, cells: Sequence[Asking], documents: list[Document], spots: list[list[tuple[int, int]]]
    ) -> list[Answered]:
        """Score a pack's documents under some of its cells; `spots` says where each request's answer is among the documents'."""
        self.lm.engine.row_tokens = cells[0].row_tokens
        policies = [build(cell.policy, cell.budget, **cell.knobs) for cell in cells]
        answered = []
        for policy, cell in zip(
            policies, self.lm.engine.score(documents, policies, pack.protocol, prefix=pack.prefix), strict=True
        ):
            refuse_broken(policy, documents, cell.tally)
            record = Record()
            record.add(documents, cell.tally)
            scores = [[cell.scores[document][place] for document, place in own] for own in spots]
            logprobs, greedy = ([[getattr(score, what) for score in own] for own in scores] for what in ("logprob", "greedy"))
            answered.append(Answered(logprobs, greedy, record.costs()))
        return answered
