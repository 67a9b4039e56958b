"""Shows policies to a user: papers, knobs, presets and needs; runs nothing."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields

from .policies import find, names, resolve

NEEDS = {
    "guess": "guesses queries from the layer before",
    "rope": "rotates keys to new positions (models with rotary positions only)",
    "whole_prompt": "a whole prompt (protocol=prompt only)",
    "received": "the attention that entries draw, wherever tokens are taken in",
    "prepare": "a calibration pass over the model, once",
    "same_length": "sequences of equal length step together",
    "whole_answer": "takes prompt and answer in together, as a published harness does",
}


def listed() -> str:
    """Return a line for each policy: its name, what it does, its paper."""
    width = max(len(name) for name in names())
    return "\n".join(f"{name:<{width}}  {_first(find(name))}  {find(name).paper}" for name in names())


def described(name: str) -> str:
    """Return all there is to say of one policy."""
    policy, preset = resolve(name)
    lines = [f"{name}: {inspect.cleandoc(policy.__doc__ or '')}", "", f"paper    {policy.paper}"]
    for field in fields(policy):
        default = preset.get(field.name, None if field.default is MISSING else field.default)
        lines.append(f"knob     {field.name} = {default}")
    for title, knobs in policy.presets.items():
        lines.append(f"preset   {name.partition(':')[0]}:{title} = {', '.join(f'{knob}={value}' for knob, value in knobs.items())}")
    lines += [f"needs    {NEEDS[need]}" for need in sorted(policy(**preset).needs)]
    return "\n".join(lines)


def _first(policy: type) -> str:
    return inspect.cleandoc(policy.__doc__ or "").split(". ")[0].splitlines()[0].rstrip(".")
