"""What is counted of a cache, by name, and the shares made of the sums; knows no model. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUANTITIES = ("held", "span", "bytes", "dense_bytes", "read", "reach", "fetched", "fetched_bytes", "queries")
HELD, SPAN, BYTES, DENSE_BYTES, READ, REACH, FETCHED, FETCHED_BYTES, QUERIES = range(len(QUANTITIES))
MEANING = {
    "held": "entries held once the policy has acted on a prompt",
    "span": "entries the full cache would hold then",
    "bytes": "bytes held then, at 2 an element",
    "dense_bytes": "bytes the full cache would hold then",
    "read": "entries that answer queries attended to",
    "reach": "entries that the full cache's would have attended to",
    "fetched": "entries fetched from host memory",
    "fetched_bytes": "bytes fetched from host memory",
    "queries": "answer queries, each as often as answers run through it",
}


def acted(tally: Any) -> Any:
    """Whether a policy did anything: held, read or stored less than the full cache; `tally` has a number, or an array, of each quantity."""
    return (tally[HELD] < tally[SPAN]) | (tally[READ] < tally[REACH]) | (tally[BYTES] < tally[DENSE_BYTES])


def shares(sums: Mapping[str, float]) -> dict[str, float | int | None]:
    """Return the shares of entries and bytes held and read, of what the full cache would hold and read; None where that is nothing."""
    ratio = lambda part, whole: sums[part] / sums[whole] if sums[whole] else None  # noqa: E731
    return {
        "held": ratio("held", "span"),
        "held_bytes": ratio("bytes", "dense_bytes"),
        "read": ratio("read", "reach"),
        "bytes": int(sums["bytes"]),
        "fetched_entries": int(sums["fetched"]),
        "fetched_bytes": int(sums["fetched_bytes"]),
        "answer_queries": int(sums["queries"]),
    }
