"""The registry of policies: one file, one policy; the file's name is the policy's. Knows where they are found, not what they do.

A policy is named `h2o`, `h2o:paper` (a preset), `./mine.py:Mine` (a class in a file) or by an installed package's entry point in the
group `evalkit.policies`; knobs may follow in brackets, `quest(dense_layers=0)`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import UsageError, nearest
from ..naming import spelled
from ..policy import Budget, Policy


def names() -> list[str]:
    """Return the names of all policies: those that ship with evalkit and those that other packages install."""
    return sorted({*shipped(), *_plugins()})


def shipped() -> list[str]:
    """Return the names of the policies in this folder."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def find(name: str) -> type[Policy]:
    """Return the policy class called `name`, without presets. Raises UsageError for an unknown one."""
    file, _, member = name.rpartition(":")
    if file.endswith(".py") or name.endswith(".py"):
        return _only(_from_file(Path(file if file.endswith(".py") else name)), member if file.endswith(".py") else None)
    if name in shipped():
        return _only(import_module(f"{__name__}.{name}"))
    if name in _plugins():
        return _checked(_plugins()[name].load(), name)
    raise UsageError(f"policy={name} is not known{nearest(name, names())}: give one of {', '.join(names())}, or FILE.py:CLASS")


def build(name: str, budget: object = None, **knobs: Any) -> Policy:
    """Return the policy called `name` (with a preset after a colon, if any) at `budget`, with `knobs` set over the name's own."""
    name, own = spelled(name)
    knobs = {**own, **knobs}
    policy, preset = resolve(name)
    known = [field.name for field in fields(policy) if field.name != "budget"]
    for knob in knobs:
        if knob not in known:
            allowed = f"its knobs are {', '.join(known)}" if known else "it has none"
            raise UsageError(f"{name} has no knob {knob!r}{nearest(knob, known)}: {allowed}")
    given = {} if budget is None else {"budget": Budget.of(budget)}
    return _validated(policy, name, {**preset, **knobs, **given})


def resolve(name: str) -> tuple[type[Policy], Mapping[str, Any]]:
    """Return the class behind `name` and the knobs of its preset."""
    head, colon, preset = name.partition(":")
    if not colon or head.endswith(".py"):
        return find(name), {}
    policy = find(head)
    if preset not in policy.presets:
        allowed = ", ".join(f"{head}:{known}" for known in policy.presets) or f"{head} alone, it has no presets"
        raise UsageError(f"policy={name} is not known{nearest(preset, policy.presets)}: give {allowed}")
    return policy, policy.presets[preset]


def _validated(policy: type[Policy], name: str, values: Mapping[str, Any]) -> Policy:
    try:
        built: Policy = TypeAdapter(policy).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        what, reason = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{name}: {what}={first['input']!r} is not allowed: {reason}" if what else f"{name}: {reason}") from None
    return built


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="evalkit.policies")}


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"policy file {path} does not exist: give FILE.py:CLASS")
    key = f"evalkit_policy_{path.stem}_{abs(hash(path.resolve()))}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        raise UsageError(f"policy file {path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _only(module: ModuleType, member: str | None = None) -> type[Policy]:
    """Return the class `member` of a module, or the one policy defined in it."""
    own = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module.__name__
    }
    if member is not None:
        if member not in own:
            raise UsageError(
                f"{module.__file__} defines no policy {member!r}{nearest(member, own)}: it defines {', '.join(own) or 'none'}"
            )
        return own[member]
    if len(own) != 1:
        raise UsageError(
            f"{module.__file__} defines {len(own)} policies: say which, as FILE.py:CLASS ({', '.join(own) or 'none is there'})"
        )
    return next(iter(own.values()))


def _checked(policy: object, name: str) -> type[Policy]:
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy
    raise UsageError(f"the entry point {name!r} in evalkit.policies is {policy!r}, not a subclass of evalkit.policy.Policy")
