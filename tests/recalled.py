"""Retention runs that no model made, for the tests of what is done with one: answers of known rightness, written through the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from evalkit.retention import facts
from evalkit.retention.protocol import load as protocol
from evalkit.retention.records import Records
from evalkit.retention.run import listed, manifest
from evalkit.retention.scripts import Script

BUCKETS, TURNS = ("1k-2k", "2k-4k"), (2, 4, 6)
RATES = {"full@100%": 0.95, "control": 0.05, "h2o@30%": 0.7, "random@30%": 0.2}  # of right answers, by a cell's label
SAYS = "The answer, as far as I recall, is this."


def query(turn: int, right: bool, **changed) -> dict:
    """What is recorded of a query."""
    return {
        "turn": turn, "question": f"What was it, at turn {turn}?", "context_tokens": 100 * turn, "distance_tokens": 90 * turn,
        "restated": False, "answer": SAYS, "contains": right, "likeness": 50.0, "fuzzy": right, "rank": 1 if right else 3,
        "logprobs": [-1.0, -2.0],
        "survival": 1.0, "survival_told": 1.0, "survival_heads": [[1.0]],
        "tally": [3.0, 10.0, 6.0, 20.0, 2.0, 8.0, 0.0, 0.0, 1.0], "seconds": 0.1, **changed,
    }  # fmt: skip


def scripts(bucket: str, sources: list[tuple[str, ...]]) -> list[Script]:
    """Conversations of a bucket, of the given parts, each told a fact of its own."""
    known, said = facts.load(), (("Say it.", "It is said."),) * max(TURNS)
    making = lambda parts: "joined" if len(parts) > 1 else "whole"  # noqa: E731
    return [
        Script(f"{bucket}/{number:04d}", making(parts), parts, said, TURNS, known[number % len(known)])
        for number, parts in enumerate(sources)
    ]


def write_run(
    folder: Path,
    source: str = "builtin",
    answer: str = SAYS,
    conversations: int = 14,
    skip: int = 0,
    unseen: dict | None = None,
    **given,
) -> Records:
    """Write a run of full, the control, h2o and random, but for its last `skip` packs; the second bucket's conversations are joined."""
    asked = protocol(
        given={"policy": "full,h2o,random", "budget": "0.3", "turns": ",".join(map(str, TURNS)), "bucket": ",".join(BUCKETS),
               "conversations": str(conversations), "together": "4", "source": source, **given}
    )  # fmt: skip
    numbers = range(conversations)
    parts = [[(f"c{number}",) for number in numbers], [(f"c{number}", f"c{number + 1}") for number in numbers]]
    chosen = {bucket: scripts(bucket, parts[place]) for place, bucket in enumerate(BUCKETS)}
    store = Records.create(folder, manifest(asked, {"digest": "0", "dtype": "float32", "device": "cpu"}, chosen, listed(asked)))
    names, changed = store.names(), {"answer": answer, **(unseen or {})}
    for name in names[: len(names) - skip]:
        cell = store.cell_of(name)
        store.record(name, [list(_asked(cell, one, changed)) for one in store.documents_of(name)], {"seconds": {}})
    return store


def _asked(cell: dict, conversation: str, changed: dict) -> Iterator[dict]:
    """A conversation's queries under a cell; who forgets more of the fact answers less."""
    for turn in TURNS:
        rate = RATES[cell["label"]] - (0.02 * turn if cell["label"] not in ("full@100%", "control") else 0)
        held = None if cell["control"] else {"full": 1.0}.get(cell["policy"], rate)
        right = Random(f"{cell['label']} {conversation} {turn}").random() < rate
        yield query(turn, right, **{"survival": held, "survival_told": held, **changed})
