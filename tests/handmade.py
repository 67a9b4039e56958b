"""Small runs whose every answer is given by hand, for the tests of what is computed from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evalkit.shares import QUANTITIES
from evalkit.store import Store, digest

Right = Sequence[int]  # of each document, whether the answer is right
Given = Mapping[str, Mapping[str, Right]]  # cell's label -> task -> what it got right
SECONDS = {"total": 1.5}


def write_by_hand(
    folder: Path,
    given: Given,
    *,
    acted: Mapping[tuple[str, str], float] | None = None,
    clusters: Mapping[str, Sequence[str]] | None = None,
    doc_ids: Sequence[int] | None = None,
    model: str = "smol",
    protocol: str = "prompt",
    skip: int = 0,
    seconds: Mapping[str, Any] = SECONDS,
    questions: str = "",
    **changes: Any,
) -> Store:
    """Write a run of two-choice tasks, a pack for each four documents, without the last `skip` packs.

    A right answer is 1 nat likelier than the wrong one. `acted` is the share of prompts on which a cell acted on a task (else 1,
    and 0 at 100 %), `questions` changes all prompts, `changes` are fields of the manifest.
    """
    rights = next(iter(given.values()))
    documents = {task: list(doc_ids or range(len(right))) for task, right in rights.items()}
    packs = {task: [ids[start : start + 4] for start in range(0, len(ids), 4)] for task, ids in documents.items()}
    manifest = {
        "evalkit": "0.1.0",
        "created": "2026-01-01T00:00:00",
        "machine": {"system": "test"},
        "plan": {"protocols": [protocol]},
        "shown": {"title": "By hand.", "margin": 1.0, "reference": None},
        "models": [{"name": model, "digest": "0123456789abcdef", "dtype": "float32", "device": "cpu", "packs": packs}],
        "cells": [
            {"key": digest([model, label]), "model": model, "protocol": protocol, "policy": label.split("@")[0],
             "budget": label.split("@")[1], "knobs": {}, "floors": []}
            for label in given
        ],
        "tasks": [
            {"name": task, "digest": digest(task), "documents": len(ids), "total": 10 * len(ids), "chance": 0.5,
             "metrics": ["acc", "acc_norm"]}
            for task, ids in documents.items()
        ],
        "versions": {"torch": "2.13.0"},
        **changes,
    }  # fmt: skip
    store = Store.create(folder, manifest)
    for task, ids in documents.items():
        labels = (clusters or {}).get(task, [None] * len(ids))
        store.write_documents(task, [_question(task, *at, questions) for at in zip(ids, labels, strict=True)])
    names = store.names()
    for name in names[: len(names) - skip]:
        ids = store.documents_of(name)
        lines = [
            _line(cell["key"], ids, [right[name.task][documents[name.task].index(doc_id)] for doc_id in ids],
                  (acted or {}).get((label, name.task), float(not label.endswith("@100%"))))
            for cell, (label, right) in zip(store.manifest["cells"], given.items(), strict=True)
        ]  # fmt: skip
        store.write(name, {"seconds": seconds, "computed_tokens": 100}, lines)
    return store


def _question(task: str, doc_id: int, cluster: str | None, questions: str) -> dict[str, Any]:
    return {
        "doc_id": doc_id, "doc_hash": digest([task, doc_id]), "prompt_hash": digest([task, doc_id, questions]), "cluster": cluster,
        "contexts": [f"Whatever is asked in {doc_id}?"] * 2, "choices": [" yes", " no"], "gold": 0,
    }  # fmt: skip


def _line(key: str, ids: list[int], right: list[int], acted: float) -> dict[str, Any]:
    """A cell's part of a pack: it holds half and reads a quarter of what the full cache would, or all where it never acted."""
    sums = dict.fromkeys(QUANTITIES, 80.0 * len(ids))
    if acted:
        sums |= {"held": 40.0 * len(ids), "bytes": 40.0 * len(ids), "read": 20.0 * len(ids)}
    costs = {"documents": len(ids), "answers": 2 * len(ids), "prompt_tokens": 0, "answer_tokens": 0, "truncated": 0, "skipped": 0,
             "acted": acted * len(ids), "sums": sums}  # fmt: skip
    metric = [float(one) for one in right]
    return {"cell": key, "logprobs": [[-1.0, -2.0] if one else [-2.0, -1.0] for one in right], "greedy": [[False] * 2] * len(ids),
            "metrics": {"acc": metric, "acc_norm": metric}, "costs": costs}  # fmt: skip
