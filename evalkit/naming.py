"""How policies are spelled where people type them: names, knobs in brackets, lists with commas; knows no policy."""

from __future__ import annotations

import re
from typing import Any

import yaml

from .errors import UsageError

PATH = re.compile(r"""(?<![^\s='",(\[:])(?:~?/(?!/)|[A-Za-z]:[\\/]|\\\\)(?:[^\s'",()\[\]\\/]+[\\/])+([^\s'",()\[\]\\/]+)""")


def spelled(text: str) -> tuple[str, dict[str, Any]]:
    """Return the policy and the knobs that `quest(dense_layers=0, page=8)` stands for. Raises UsageError for values that are none."""
    match = re.fullmatch(r"\s*([^()]+?)\s*\((.*)\)\s*", text)
    if match is None:
        return text.strip(), {}
    knobs = [knob.partition("=") for knob in match[2].split(",") if knob.strip()]
    try:
        return match[1], {name.strip(): yaml.safe_load(value) for name, _, value in knobs}
    except yaml.YAMLError:
        raise UsageError(f"policy={text} cannot be read: give knobs as {match[1]}(NAME=VALUE, ...)") from None


def placeless(value: Any) -> Any:
    """Return a manifest's value with absolute paths cut to their last parts: where files lay is not for a report's readers.

    What is called `name` stays, as others know it by that.
    """
    if isinstance(value, dict):
        return {name: each if name == "name" else placeless(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [placeless(each) for each in value]
    return PATH.sub(r"\1", value) if isinstance(value, str) else value


def listed(text: str) -> list[str]:
    """Return the entries of a list with commas, but for those in brackets."""
    return [entry.strip() for entry in re.split(r",(?![^()]*\))", text) if entry.strip()]
