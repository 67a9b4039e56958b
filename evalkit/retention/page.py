"""Makes of a retention report one page that needs nothing else, with single answers that a policy lost; shows no conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..html import assembled
from . import facts
from .report import Query, Report
from .sources import BUILTIN

MOST = 10  # lost answers that the page holds of each cell, bucket and turn
SHOWN = ("turn", "conversation", "making", "fact", "kind", "context_tokens", "distance_tokens", "survival", "survival_told", "rank")

Json = dict[str, Any]


def page(report: Report, show_text: bool = False) -> str:
    """Return the report as HTML that works from a file, with the first `MOST` answers that each policy lost at each turn.

    Their questions and answers are in it where the conversations are evalkit's own, and otherwise with `show_text` alone: an
    answer may repeat what somebody said.
    """
    value = report.as_dict()
    texts = show_text or report.manifest["protocol"]["source"] == BUILTIN
    return assembled("retention", value["title"], {"report": value, "lost": lost(report, texts)})


def lost(report: Report, texts: bool) -> Json:
    """Return the answers that are right under full and wrong under a policy, and how many are left out of each cell, bucket and turn."""
    answers = {fact.id: list(fact.answers) for fact in facts.load()}
    queries: list[Json] = []
    left_out: list[Json] = []
    for about, found in _lost(report):
        queries += [{**about, **_told(full, query, answers, texts)} for full, query in found[:MOST]]
        if len(found) > MOST:
            left_out.append({**about, "count": len(found) - MOST})
    return {"most": MOST, "texts": texts, "queries": queries, "left_out": left_out}


def _lost(report: Report) -> Iterator[tuple[Json, list[tuple[Query, Query]]]]:
    """The pairs that each policy lost, by bucket and turn."""
    for cell in report.cells[1:]:
        for bucket in (bucket["name"] for bucket in report.manifest["buckets"] if not cell.control):
            for turn in report.manifest["protocol"]["turns"]:
                pairs = report.pairs(cell, bucket, turn)
                about = {"label": cell.label, "bucket": bucket, "turn": turn}
                yield about, [(full, query) for full, query in pairs if full["contains"] and not query["contains"]]


def _told(full: Query, query: Query, answers: Mapping[str, list[str]], texts: bool) -> Json:
    """What the page says of a lost answer. Facts are evalkit's own, so what is accepted is no secret."""
    said = {"question": query["question"], "full": full["answer"], "answer": query["answer"]} if texts else {}
    about = {name: query[name] for name in SHOWN}
    return {**about, "full_rank": full["rank"], "accepted": answers.get(query["fact"]), **said}
