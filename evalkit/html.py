"""Makes of a run and its report one page that needs nothing else: no network, no font, no library; knows nothing of models."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .runs import Answers, Run
from .spots import METRIC

MOST = 30  # flipped documents that the page holds of each cell and task
LONGEST = 2000  # characters of a prompt that are shown: its end, where the question is
PARTS = Path(__file__).parent / "page"

Json = dict[str, Any]


def page(run: Run, report: Mapping[str, Any], documents: bool = True) -> str:
    """Return the report as HTML that works from a file.

    `report` is the dict of `Report.as_dict` of this run. With `documents` the page also holds the texts of documents whose
    answer a policy flipped, the first `MOST` of each cell and task. Whatever these texts say, the page shows and never runs it.
    """
    title = report["title"] or "Accuracy against budget"
    return assembled("sweep", title, {"report": report, "flips": flips(run, report) if documents else None})


def assembled(kind: str, title: str, data: Mapping[str, Any]) -> str:
    """Return a page of a kind, sweep or retention: the parts and the script that bear its name, with `data` for them to draw."""
    style, script = _part("page.css"), _part("page.js") + _part(f"{kind}.js")
    texts = {
        "title": escape(title),
        "policy": f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        "style": style,
        "main": _part(f"{kind}.html"),
        "script": script,
        "data": embedded(data),
    }
    # All at once: what was filled in is not searched for places again.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: texts[place[1]], _part("page.html"))


def _part(name: str) -> str:
    return (PARTS / name).read_text("utf-8")


def _hash(text: str) -> str:
    """The name under which a browser lets a style or script of ours through, and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embedded(data: object) -> str:
    """Return JSON that can stand inside a script element: nothing in it begins a tag, and what is no number is null."""
    return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


# Documents whose answer a policy flipped


def flips(run: Run, report: Mapping[str, Any]) -> Json:
    """Return the flipped answers of every cell and task, the first `MOST` of each.

    `flips` has one entry for each: cell, task, document, kind (lost or gained), log-likelihoods under `full` and under the
    `other`; `texts` has what those documents ask, by task and doc_id; `left_out` counts the rest by cell and task.
    """
    found: list[Json] = []
    left_out: list[Json] = []
    for group in report["groups"]:
        (full,) = (cell["key"] for cell in group["cells"] if cell["full"])
        for cell in (cell["key"] for cell in group["cells"] if not cell["full"]):
            for task in (task["name"] for task in group["tasks"]):
                flipped = list(_flipped(run.answers[full, task], run.answers[cell, task]))
                found += [{"cell": cell, "task": task, **flip} for flip in flipped[:MOST]]
                if rest := flipped[MOST:]:
                    kinds = [flip["kind"] for flip in rest]
                    left_out.append({"cell": cell, "task": task, **{kind: kinds.count(kind) for kind in ("lost", "gained")}})
    return {"most": MOST, "flips": found, "texts": _texts(run, found), "left_out": left_out}


def _flipped(full: Answers, other: Answers) -> Iterator[Json]:
    """The documents that are right under one of the two alone, in the order of their ids."""
    change = other.metrics[METRIC] - full.metrics[METRIC]
    for place in np.flatnonzero(change).tolist():
        yield {
            "document": int(full.doc_ids[place]),
            "kind": "lost" if change[place] < 0 else "gained",
            "full": _rounded(full.logprobs[place]),
            "other": _rounded(other.logprobs[place]),
        }


def _rounded(logprobs: NDArray[np.float64]) -> list[float]:
    return [round(value, 3) for value in logprobs.tolist()]


def _texts(run: Run, found: list[Json]) -> dict[str, dict[int, Json]]:
    """What the documents that were found ask: each text once."""
    wanted: dict[str, set[int]] = {}
    for flip in found:
        wanted.setdefault(flip["task"], set()).add(flip["document"])
    return {
        task: {document["doc_id"]: _text(document) for document in run.documents(task) if document["doc_id"] in ids}
        for task, ids in wanted.items()
    }


def _text(document: Mapping[str, Any]) -> Json:
    """One document: its prompt, or one for each choice where they differ; the choices; which of them is right."""
    prompts = document["contexts"] if len(set(document["contexts"])) > 1 else document["contexts"][:1]
    return {"prompts": [_end(text) for text in prompts], "choices": document["choices"], "gold": document["gold"]}


def _end(text: str) -> str:
    left = len(text) - LONGEST
    return text if left <= 0 else f"[{left} characters left out] {text[left:]}"
