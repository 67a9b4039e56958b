"""Writes a run's answers as lm-eval's own files, results and samples, for every cell; knows no model."""

from __future__ import annotations

import json
from typing import Any

from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list

from ..runs import Cell, Run
from ..store import Store, slug, write
from .tasks import Answer, Asked


def export(store: Store, asked: Asked) -> None:
    """Write `cells/MODEL/PROTOCOL/POLICY@BUDGET/results_DATE.json` and `samples_TASK_DATE.jsonl` for every cell that lacks them."""
    run, date = Run.load(store.folder), store.manifest["created"].replace(":", "-")
    for cell in run.cells:
        folder = store.folder / "cells" / slug(cell.model) / cell.protocol / slug(named(cell))
        done = folder / f"results_{date}.json"
        if done.exists():
            continue
        found = asked.answered(answers(run, cell))
        samples = found.pop("samples")
        for task, lines in samples.items():
            write(folder / f"samples_{task}_{date}.jsonl", "".join(_sample(line) for line in lines))
        found["task_hashes"] = {task: _hashed(lines) for task, lines in samples.items()}
        found["config"] = config(run, cell)
        found["date"] = store.manifest["created"]
        write(done, json.dumps(found, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n")


def named(cell: Cell) -> str:
    """The name of a cell's folder."""
    rows = f" rows {cell.knobs['row_tokens']}" if cell.full and "row_tokens" in cell.knobs else ""
    return f"{cell.label}{rows}"


def answers(run: Run, cell: Cell) -> dict[tuple[str, int], list[Answer]]:
    """Return what a cell answered to each (task, doc_id), from the packs."""
    found: dict[tuple[str, int], list[Answer]] = {}
    for name in run.store.names():
        if (name.model, name.protocol) != (cell.model, cell.protocol):
            continue
        head, lines = run.store.read(name)
        line = next(line for line in lines if line["cell"] == cell.key)
        for doc_id, logprobs, greedy in zip(head["documents"], line["logprobs"], line["greedy"], strict=True):
            found[name.task, doc_id] = list(zip(logprobs, greedy, strict=True))
    return found


def config(run: Run, cell: Cell) -> dict[str, Any]:
    """What a run of this cell through lm-eval would say of itself, with what it cost under `evalkit`."""
    manifest = run.store.manifest
    (model,) = (model for model in manifest["models"] if model["name"] == cell.model)
    (choice,) = (choice for choice in manifest["plan"]["models"] if choice["name"] == cell.model)
    costs = {task.name: dict(run.answers[cell.key, task.name].costs) for task in run.tasks}
    settings = {name: manifest["plan"][name] for name in ("attn", "overlength", "row_tokens", "prefill_chunk", "offload")}
    asked = {"policy": cell.policy.partition("(")[0], "budget": cell.budget, "protocol": cell.protocol}
    return {
        "model": "kv",
        "model_args": {"pretrained": cell.model, **choice["args"], **asked, **settings, **cell.knobs},
        "model_dtype": model["dtype"],
        "fewshot_seed": manifest["plan"]["seeds"]["fewshot"],
        "evalkit": {
            "run": run.store.digest, "key": cell.key, "policy": cell.policy, "knobs": dict(cell.knobs), "budget": cell.budget,
            "protocol": cell.protocol, "attn": model["attn"], "model_digest": model["digest"], "tasks": costs,
        },
    }  # fmt: skip


def _sample(sample: dict[str, Any]) -> str:
    """One line of a samples file, in the form in which lm-eval writes it."""
    arguments = {f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(given)} for i, given in enumerate(sample["arguments"])}
    written = {
        **sample, "arguments": arguments, "resps": sanitize_list(sample["resps"]),
        "filtered_resps": sanitize_list(sample["filtered_resps"]), "target": str(sample["target"]),
    }  # fmt: skip
    return json.dumps(written, default=handle_non_serializable, ensure_ascii=False) + "\n"


def _hashed(samples: list[dict[str, Any]]) -> str:
    return hash_string("".join(sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"] for sample in samples))
