"""Runs that no model made, for the tests of what is done with a run: cells of known accuracy, written through the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evalkit.shares import QUANTITIES
from evalkit.store import Store, digest

BUDGETS = {"2%": 0.02, "10%": 0.1, "50%": 0.5, "100%": 1.0}
CHOICES = {"piqa": 2, "hellaswag": 4, "boolq": 2}


def manifest(policies=("full", "h2o", "random"), documents=96, pack=32, protocols=("prompt",), model="smol") -> dict:
    """What a sweep would write at its start."""
    cells = [
        {"key": digest([model, protocol, policy, budget]), "model": model, "protocol": protocol, "policy": policy,
         "budget": budget, "knobs": {}, "floors": []}
        for protocol in protocols for policy in policies for budget in (["100%"] if policy == "full" else BUDGETS)
    ]  # fmt: skip
    packs = {task: [list(range(start, min(start + pack, documents))) for start in range(0, documents, pack)] for task in CHOICES}
    return {
        "evalkit": "0.1.0",
        "created": "2026-01-01T00:00:00",
        "machine": {"system": "test"},
        "plan": {"protocols": list(protocols)},
        "shown": {"title": "A made-up run.", "margin": 1.0, "reference": None},
        "models": [{"name": model, "digest": "0123456789abcdef", "dtype": "float32", "device": "cpu", "packs": packs}],
        "cells": cells,
        "tasks": [
            {"name": task, "digest": digest(task), "documents": documents, "total": 10 * documents, "chance": 1 / choices,
             "metrics": ["acc", "acc_norm"]}
            for task, choices in CHOICES.items()
        ],
        "versions": {"torch": "2.13.0", "transformers": "5.19.0", "lm_eval": "0.4.13"},
    }  # fmt: skip


def question(task: str, doc_id: int) -> dict:
    """What one made-up document asks."""
    choices = [f" choice {letter} of {doc_id} & <more>" for letter in "abcd"[: CHOICES[task]]]
    return {
        "doc_id": doc_id, "doc_hash": digest([task, doc_id]), "prompt_hash": digest([task, doc_id, "prompt"]),
        "cluster": f"passage {doc_id // 2}" if task == "boolq" else None,
        "contexts": [f"Question {doc_id} of {task}: <b>why</b>?"] * len(choices), "choices": choices, "gold": doc_id % CHOICES[task],
    }  # fmt: skip


def write_run(folder: Path, skip: int = 0, seed: int = 0, worse: float = 0.5, **given) -> Store:
    """Write a run into `folder`, but for its last `skip` packs; cells with less budget answer with more noise, scaled by `worse`."""
    store = Store.create(folder, manifest(**given))
    documents = store.manifest["tasks"][0]["documents"]
    for task in CHOICES:
        store.write_documents(task, [question(task, doc_id) for doc_id in range(documents)])
    names = store.names()
    for name in names[: len(names) - skip]:
        ids = store.documents_of(name)
        cells = [cell for cell in store.manifest["cells"] if cell["protocol"] == name.protocol]
        store.write(
            name, {"seconds": {"total": 1.5}, "computed_tokens": 640}, [line(name, cell, ids, seed, worse) for cell in cells]
        )
    return store


def line(name, cell: dict, ids: list[int], seed: int, worse: float) -> dict:
    """One cell's part of a pack."""
    choices, share = CHOICES[name.task], BUDGETS[cell["budget"]]
    logprobs, acc = [], []
    for doc_id in ids:
        base = np.random.default_rng([seed, doc_id, choices]).normal(0, 1, choices)
        base[doc_id % choices] += 0.8
        own = np.random.default_rng([seed, doc_id, int(digest(cell["policy"]), 16) % 1000])
        scores = -10 + base + own.normal(0, 1, choices) * worse * (1 - share) * (2 if cell["policy"] == "random" else 1)
        logprobs.append([round(float(score), 4) for score in scores])
        acc.append(float(np.argmax(scores) == doc_id % choices))
    sums = dict.fromkeys(QUANTITIES, 100.0 * len(ids))
    sums |= {"held": 100.0 * len(ids) * share, "bytes": 100.0 * len(ids) * share, "read": 100.0 * len(ids) * (0.2 + 0.8 * share)}
    costs = {
        "documents": len(ids), "answers": len(ids) * choices, "prompt_tokens": 30 * len(ids), "answer_tokens": 8 * len(ids),
        "truncated": 0, "skipped": 0, "acted": len(ids) if share < 1 else 0, "sums": sums,
    }  # fmt: skip
    return {"cell": cell["key"], "logprobs": logprobs, "greedy": [[False] * choices] * len(ids),
            "metrics": {"acc": acc, "acc_norm": acc}, "costs": costs}  # fmt: skip
