"""Scores documents under many cells: which cells are one, which documents share a row, what the logits say. Knows tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import attention
from .documents import Asked, Document
from .engine import Runner
from .errors import UsageError
from .memory import Branch, Cell, Grants, State
from .packing import Branches, Packing, kin
from .policy import Budget, Policy
from .shares import FETCHED, FETCHED_BYTES, QUANTITIES

LEAST_PREFIX = 128  # tokens: a shorter beginning is as soon computed in every row
MANY = 4  # with many cells rows grow up to so many times: what steps token by token then steps together


@dataclass(frozen=True)
class Score:
    """How likely an answer is: its summed log-probability, and whether greedy decoding would say it."""

    logprob: float
    greedy: bool


@dataclass
class CellScores:
    """One cell's scores, document by document, and its tally."""

    policy: Policy
    scores: list[list[Score]]
    tally: Tensor  # [shares.QUANTITIES, documents]


@dataclass
class Scoring:
    """Documents on their way through packed rows."""

    engine: Runner
    documents: Sequence[Document]
    cells: Sequence[Cell]
    protocol: str
    prefix: int = 0  # tokens that all prompts begin with, to be taken in once

    def __post_init__(self) -> None:
        self.refuse_chunks()
        looked_at = max((cell.policy.observed for cell in self.cells), default=0)  # together, so in the document's own part
        self.prefix = self.prefix - looked_at if self.prefix - looked_at >= LEAST_PREFIX else 0
        if any(self.engine.fetches(cell.policy) for cell in self.cells):  # any cell may stand in for it where both read everything
            self.cells = [replace(cell, fetching=True) for cell in self.cells]
        self.work: list[list[Asked]] = []
        self.where: list[list[Asked]] = []  # for every document and cell, under which equal cell it is scored
        slots = 0
        for number, document in enumerate(self.documents):
            equals: dict[object, Asked] = {}
            self.where.append([])
            for turn, cell in enumerate(self.cells):
                key = self.identity(cell.policy, document)
                if key not in equals:
                    equals[key] = Asked(
                        turn * len(self.documents) + number, document, cell, range(slots, slots + len(document.answers))
                    )
                    slots += len(document.answers)
                self.where[-1].append(equals[key])
            self.work.append(list(equals.values()))
        self.logprobs = torch.zeros(slots, dtype=torch.float64, device=self.engine.device)
        self.misses = torch.zeros(slots, dtype=torch.long, device=self.engine.device)

    def refuse_chunks(self) -> None:
        """Raise UsageError where a policy that must see prompts and answers in one pass would get them in chunks."""
        longest, chunk = max((len(document.taken) for document in self.documents), default=0), self.engine.prefill_chunk
        for policy in (cell.policy for cell in self.cells if longest > chunk and "whole_answer" in cell.policy.needs):
            raise UsageError(
                f"prefill_chunk={chunk} is below a prompt of {longest} tokens, which {type(policy).__name__} at these settings takes in "
                f"in one pass with its answer: give prefill_chunk={longest} or more, or another preset"
            )

    def identity(self, policy: Policy, document: Document) -> object:
        """What must agree for two cells to compute the same: everything but the budget, and what the budget grants."""
        if policy.passive or policy.lossless:
            return None
        if "whole_answer" in policy.needs:  # its budget is a share of each answer's whole sequence
            return policy
        budget, windows = policy.budget, (None, *self.engine.windows)
        grants = None if budget.whole else tuple(budget.allowance(document.basis, window) for window in windows)
        return (replace(policy, budget=Budget()), grants)

    def streams(self, policy: Policy) -> bool:
        return self.protocol == "stream" and not policy.passive

    def apart(self, policy: Policy) -> bool:
        """Whether the policy's prompts cannot be shared with other cells."""
        return self.streams(policy) or "whole_answer" in policy.needs

    def size(self, asked: Sequence[Asked]) -> int:
        """The tokens a document adds to a row, about."""
        tree = sum(len(node.tokens) for node in asked[0].document.tree().walk())
        prompt = len(asked[0].document.taken)
        apart = sum(self.apart(one.cell.policy) for one in asked)
        return len(asked) * tree + apart * prompt + (apart < len(asked)) * (prompt - self.prefix)

    def rows(self) -> list[list[list[Asked]]]:
        """Part the documents into rows: those that share a beginning together, long ones first."""
        config = self.engine.model.config
        longest = lambda asked: len(asked[0].document.prompt) + max(map(len, asked[0].document.answers)) - 1  # noqa: E731
        batches: list[list[list[Asked]]] = []
        room, last = 0, None
        parts = [part for asked in self.work for part in self.parts(asked)]
        for family in sorted(_families(parts), key=lambda family: -max(map(longest, family))):
            for asked in family:
                regime, size = attention.regime(config, longest(asked)), self.size(asked)
                full = bool(batches) and len(batches[-1]) == self.engine.row_documents
                if not batches or size > room or regime != last or full:
                    batches.append([])
                    room, last = self.engine.row_tokens * min(len(self.cells), MANY), regime
                batches[-1].append(asked)
                room -= size
        return batches

    def parts(self, asked: list[Asked]) -> list[list[Asked]]:
        """Part a document by the rotations that its answers' lengths get; nearly always there is one."""
        document, groups = asked[0].document, defaultdict(list)
        for i, answer in enumerate(document.answers):
            groups[attention.regime(self.engine.model.config, len(document.prompt) + len(answer) - 1)].append(i)
        return [asked] if len(groups) == 1 else [[one.only(chosen) for one in asked] for chosen in groups.values()]

    def run(self, batch: Sequence[list[Asked]]) -> None:
        """Score one row's documents."""
        packing, whole = Packing(), []
        streamed: dict[object, list[Asked]] = defaultdict(list)
        packing.simulated([one for asked in batch for one in asked if "whole_answer" in one.cell.policy.needs])
        branches: Branches = []
        rotating = attention.follows_length(self.engine.model.config)  # then a prompt must share its answers' row
        for asked in batch:
            inside = [one for one in asked if not self.apart(one.cell.policy)]
            for one in asked:
                if self.streams(one.cell.policy):
                    streamed[kin(one.cell.policy)].append(one)
            if len(asked[0].document.taken) - self.prefix > self.engine.prefill_chunk and inside and not rotating:
                branches += self.taken_before(inside)
            elif inside:
                whole.append(inside)
        if whole and self.prefix and not rotating:
            tokens = whole[0][0].document.taken[: self.prefix]
            branches += packing.continued(
                whole, self.engine.begin(tokens, [cell for cell in self.cells if not self.apart(cell.policy)])
            )
        elif whole:
            branches += packing.prompts(whole)
        packing.answers(branches)
        for same in streamed.values():
            packing.answers(packing.streams(same), stream=True)
        self.settle(packing, self.engine.run(packing))

    def taken_before(self, asked: Sequence[Asked]) -> Branches:
        """Take in a long prompt in blocks, in rows of its own."""
        grants = [Grants([(one.cell.policy.budget, one.document.basis)]) for one in asked]
        branches = [Branch(one.cell, grant, [one.number], State(lasting=True)) for one, grant in zip(asked, grants, strict=True)]
        self.engine.take_in(asked[0].document.taken, 0, branches, None)
        return [(branch, [one]) for branch, one in zip(branches, asked, strict=True)]

    def settle(self, packing: Packing, logits: Tensor) -> None:
        """Add up what the row's logits [W, V] say of each answer."""
        with self.engine.counters.phase("readout"):
            at, targets, slots = packing.readout.sorted()
            logprobs, best = likelihoods(logits, at, targets)
            where = torch.tensor(slots, device=self.logprobs.device)
            self.logprobs.index_add_(0, where, logprobs.to(self.logprobs))
            self.misses.index_add_(0, where, (~best).to(self.misses))

    def results(self) -> list[CellScores]:
        """Return every cell's scores, in the documents' order."""
        logprobs, misses = self.logprobs.tolist(), self.misses.tolist()
        tally = self.cells[0].tally if self.cells else None
        totals = torch.zeros(len(QUANTITIES), len(self.cells) * len(self.documents)) if tally is None else tally.totals()
        results = []
        for turn, cell in enumerate(self.cells):
            where = [row[turn] for row in self.where]
            scores = [[Score(logprobs[slot], not misses[slot]) for slot in asked.slots] for asked in where]
            counted = totals[:, [asked.number for asked in where]]
            counted[[FETCHED, FETCHED_BYTES]] *= self.engine.fetches(cell.policy)
            results.append(CellScores(cell.policy, scores, counted))
        return results


def _families(work: Sequence[list[Asked]]) -> list[list[list[Asked]]]:
    """Put documents whose prompts begin alike next to each other."""
    ordered = sorted(work, key=lambda asked: asked[0].document.prompt)
    families: list[list[list[Asked]]] = []
    for asked in ordered:
        begins = asked[0].document.prompt[:8]
        if families and len(begins) == 8 and families[-1][-1][0].document.prompt[:8] == begins:
            families[-1].append(asked)
        else:
            families.append([asked])
    return families


def likelihoods(logits: Tensor, at: Sequence[int], targets: Sequence[int], chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Return the log-probability of `targets` [R] at rows `at` [R] of `logits` [W, V], and whether each is its row's likeliest token.

    In fp32 (fp64 for fp64 models) by log_softmax, as lm-eval does it, so that rounding agrees with its own models. `at` ascends.
    """
    logprobs, best = [], []
    for start in range(0, len(logits), chunk):
        low, high = bisect_left(at, start), bisect_left(at, start + chunk)
        part = logits[start : start + chunk]
        exact = part if part.dtype == torch.float64 else part.float()
        rows = torch.tensor(at[low:high], dtype=torch.long, device=logits.device) - start
        wanted = torch.tensor(targets[low:high], dtype=torch.long, device=logits.device)
        logprobs.append(exact.log_softmax(-1)[rows, wanted])
        best.append(exact.argmax(-1)[rows] == wanted)
    return torch.cat(logprobs), torch.cat(best)
