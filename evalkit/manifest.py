"""What a sweep writes down before it begins: cells, tasks and packs, and all that can change a number; computes none."""

from __future__ import annotations

import hashlib
import inspect
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import UsageError
from .paged import Stored
from .plan import FULL, ModelChoice, Plan
from .policies import build
from .policy import Policy
from .settings import refuse_offload
from .store import digest

if TYPE_CHECKING:
    from .harness.worker import Encoded, Ready

PACKAGES = ("torch", "transformers", "lm_eval")
IN_TOKENS = frozenset({"name", "packs", "truncated", "skipped"})  # what a manifest says of a model beside the worker's description
LONG = 64  # tokens of a prompt and its answers
OTHER_ROWS = 4  # the noise floor's rows are so many times shorter


def policies(plan: Plan) -> list[tuple[str, Policy]]:
    """Return the policies of a plan by the names that tables use, at all their budgets. Raises UsageError for what they refuse."""
    found = []
    for choice in plan.measured():
        knobs = ", ".join(f"{name}={value}" for name, value in choice.knobs.items())
        for budget in choice.budgets or ():
            try:
                policy = build(choice.name, budget, **choice.knobs)
                refuse_offload(policy, plan.offload)
                for protocol in plan.protocols:
                    policy.check(protocol)
            except UsageError as error:
                raise UsageError(f"policy {choice.name} of the plan: {error}") from None
            found.append((f"{choice.name}({knobs})" if knobs else choice.name, policy))
    return found


def manifest(
    plan: Plan,
    models: Sequence[tuple[ModelChoice, Mapping[str, Any], Mapping[str, Encoded]]],
    tasks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a run's manifest: `models` with what their workers say of them and the tasks' documents in their tokens."""
    return {
        "plan": plan.identity(),
        "shown": shown(plan),
        "models": [_model(plan, *model) for model in models],
        "tasks": list(tasks),
        "paged": {choice.name: {task: stored(found, plan.shard) for task, found in told.items()} for choice, _, told in models},
        "cells": [cell for model in models for cell in _cells(plan, *model, tasks)],
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.system(), "processor": platform.machine(), "python": platform.python_version()},
        "command": " ".join(["evalkit", *sys.argv[1:]]),
    }


def shown(plan: Plan) -> dict[str, Any]:
    """Return what tables show of a plan beside its numbers; it may change after the run."""
    reference = plan.reference and plan.reference.model_dump(mode="json")
    return {"title": plan.title, "margin": plan.margin, "reference": reference}


def agrees(written: Mapping[str, Any], plan: Plan, tasks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a manifest is the one that a plan would get now, by all that can be told without loading its models."""
    if (written["plan"], written["tasks"]) != (plan.identity(), list(tasks)):
        return False
    described = [{name: value for name, value in model.items() if name not in IN_TOKENS} for model in written["models"]]
    cells = [cell for choice, model in zip(plan.models, described, strict=True) for cell in _cells(plan, choice, model, {}, tasks)]
    return [cell["key"] for cell in cells] == [cell["key"] for cell in written["cells"]]


def versions() -> dict[str, str]:
    return {"evalkit": __version__, **{name: version(name) for name in PACKAGES}}


def _model(plan: Plan, choice: ModelChoice, described: Mapping[str, Any], encoded: Mapping[str, Encoded]) -> dict[str, Any]:
    return {
        "name": choice.name,
        **described,
        "packs": {
            task: [[ready.doc_id for ready in pack] for pack in packed(found, plan.shard)] for task, found in encoded.items()
        },
        "truncated": {task: found.truncated for task, found in encoded.items()},
        "skipped": {task: found.skipped for task, found in encoded.items()},
    }


def _cells(
    plan: Plan,
    choice: ModelChoice,
    described: Mapping[str, Any],
    encoded: Mapping[str, Encoded],
    tasks: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """One model's cells; each key is a digest of all that can change one of its numbers."""
    shared = {"plan": {**plan.identity(), "policies": None, "budgets": None, "protocols": None, "tasks": None, "models": None}}
    shared |= {"model": dict(described), "args": choice.args, "tasks": {task["name"]: task["digest"] for task in tasks}}
    used, asked = versions(), policies(plan)
    cells = []
    for protocol in plan.protocols:
        for name, policy in asked:
            own = {"model": choice.name, "protocol": protocol, "policy": name, "budget": str(policy.budget), "knobs": policy.knobs}
            cells.append({**own, "floors": _floors(policy, encoded), "key": digest([shared, used, own, _source(policy)])})
        if plan.noise_floor:
            rows = {"row_tokens": max(1, plan.row_tokens // OTHER_ROWS)}
            own = {"model": choice.name, "protocol": protocol, "policy": FULL, "budget": "100%", "knobs": rows}
            cells.append({**own, "floors": [], "key": digest([shared, used, own])})
    return cells


def _floors(policy: Policy, encoded: Mapping[str, Encoded]) -> list[str]:
    """The tasks on half of whose prompts, or more, the policy holds or reads more than it is granted, by its own account."""
    found = []
    for task, documents in encoded.items():
        sizes = [len(ready.longest) - 1 for ready in documents.documents]
        above = sum(policy.budget.allowance(size) < min(policy.floor, size) for size in sizes)
        if not policy.lossless and sizes and 2 * above >= len(sizes):
            found.append(task)
    return found


def _source(policy: Policy) -> str:
    """A digest of the file that defines a policy: with another file its numbers may be others."""
    return hashlib.sha256(Path(inspect.getfile(type(policy))).read_bytes()).hexdigest()[:16]


def stored(encoded: Encoded, size: int) -> dict[str, int]:
    """Return what all prompts of a task take at once in blocks; those of a pack that agree are one, as when they are scored."""
    held = Stored(encoded.token_bytes)
    for pack in packed(encoded, size):
        held.add(dict.fromkeys(prompt[:-1] for ready in pack for prompt, _ in ready.requests))
    return held.as_dict()


def packed(encoded: Encoded, size: int) -> list[list[Ready]]:
    """Part documents into packs: those that begin alike next to each other, else by length, long ones first.

    A pack holds at most `size` documents, and fewer where they are longer than LONG tokens: what a killed run loses stays small.
    """
    families: dict[object, list[Ready]] = {}
    for ready in encoded.documents:
        families.setdefault(ready.longest[:16], []).append(ready)
    ordered = sorted(families.values(), key=lambda family: (-max(len(one.longest) for one in family), family[0].doc_id))
    packs: list[list[Ready]] = []
    prefix, room = encoded.prefix, 0
    for ready in (one for family in ordered for one in sorted(family, key=lambda one: (-len(one.longest), one.doc_id))):
        tokens = max(LONG, sum(len(answer) for _, answer in ready.requests) + len(ready.longest) - prefix)
        if tokens > room:
            packs.append([])
            room = size * LONG
        packs[-1].append(ready)
        room -= tokens
    return packs
