"""What a perf run is asked: which cells, over which prompt lengths, batches or output lengths; knows no model and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from ..errors import UsageError
from ..naming import listed
from ..plan import FULL
from ..policies import build
from ..policy import Budget
from ..size import cells, tokens
from .records import KINDS, SHORTEST

TTFT, BATCH, DECODE = KINDS
TINY = "tiny"  # the model of random weights that needs no file
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Cell:
    """A policy at a budget, as its name in tables says. `naive`: all of a prompt's attention weights are made at once."""

    label: str
    policy: str
    budget: str
    naive: bool = False
    counted: bool = True  # whether anything is counted but the seconds as a whole


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A perf run. `over` are prompt lengths (ttft), sequences (batch) or output lengths (decode)."""

    kind: str
    cells: tuple[Cell, ...]
    over: tuple[int, ...]
    prompt_tokens: int = 0
    output_tokens: int = 1
    repeats: int = 3
    memory_cap: int | None = None  # bytes
    model: str | None = None
    dtype: str | None = None
    text: str | None = None  # the file that prompts are cut from; else the calibration text

    def prompts(self, at: int) -> list[int]:
        """Return the lengths of the prompts at a place of `over`: a batch's are uniform, and its first ones those of a smaller batch."""
        if self.kind == BATCH:
            draw = Random(0)
            return [draw.randint(max(2, self.prompt_tokens // SHORTEST), self.prompt_tokens) for _ in range(at)]
        return [at if self.kind == TTFT else self.prompt_tokens]

    def output(self, at: int) -> int:
        """Return how many tokens each sequence says at a place of `over`."""
        return at if self.kind == DECODE else self.output_tokens

    @property
    def positions(self) -> int:
        """The longest sequence that comes up; the last token said is in none."""
        return max(max(self.prompts(at)) + self.output(at) - 1 for at in self.over)

    def turn(self, repeat: int) -> list[Cell]:
        """Return the cells in the order of a repeat: each begins with another one."""
        first = repeat % len(self.cells)
        return [*self.cells[first:], *self.cells[:first]]

    def identity(self) -> dict[str, Any]:
        """Return all of it as JSON holds it, but for the cells."""
        told = asdict(self)
        del told["cells"]
        return {**told, "over": list(self.over)}


def chosen(policies: str, budgets: str, *, naive: str | None = None, uncounted: bool = False) -> tuple[tuple[Cell, ...], list[str]]:
    """Return the cells that lists with commas ask for, full first, and what policies say that refuse a budget.

    `naive` names policies to measure also with all attention weights made at once; `uncounted`: full also with nothing counted.
    """
    asked = [FULL, *(name for name in listed(policies) if name != FULL)]
    found, refused = cells(asked, [Budget.of(budget) for budget in listed(budgets)])
    plain = list(dict.fromkeys(Cell(labelled(name, str(policy.budget)), name, str(policy.budget)) for name, policy in found))
    named = listed(naive or "")
    for name in named:
        build(name)
        if name not in asked:
            raise UsageError(f"naive={name} is not among the policies that are measured: give it in --policy, too")
    wide = [Cell(f"{cell.label}, T x T", cell.policy, cell.budget, naive=True) for cell in plain if cell.policy in named]
    bare = [Cell(f"{FULL}, nothing counted", FULL, plain[0].budget, counted=False)] if uncounted else []
    return (*plain, *wide, *bare), refused


def asked(given: Mapping[str, Any], kind: str, over: str, name: str, prompt: str, output: str) -> tuple[Asked, list[str]]:
    """Return the run that the command line asks for, and what policies say that refuse a budget. Raises UsageError for bad words.

    `over` are the places, given as `name`; `prompt` and `output` the tokens of each prompt and those said, where they are not the places.
    """
    found, refused = chosen(given["policy"], given["budget"], naive=given["naive"], uncounted=given["uncounted"])
    text = given["text"]
    if text is not None and not Path(text).is_file():
        raise UsageError(f"text={text} is no file: give a text in UTF-8")
    return Asked(
        kind=kind,
        cells=found,
        over=counts(over, name),
        prompt_tokens=tokens(prompt, "prompt-tokens"),
        output_tokens=tokens(output, "output-tokens"),
        repeats=given["repeats"],
        memory_cap=bytes_of(given["memory_cap"]),
        model=given["model"],
        dtype=given["dtype"],
        text=text,
    ), refused


def labelled(name: str, budget: str) -> str:
    """Return what tables call a policy at a budget."""
    return name if budget == "100%" else f"{name}@{budget}"


def counts(text: str, name: str) -> tuple[int, ...]:
    """Read numbers with commas such as 1k,2k,512, in ascending order. Raises UsageError for what is none."""
    found = sorted({tokens(one, name) for one in listed(text)})
    if not found:
        raise UsageError(f"{name} names no number: give some with commas, as 1k,2k")
    return tuple(found)


def bytes_of(text: str | None) -> int | None:
    """Read a number of bytes such as 4G or 512M. Raises UsageError for what is none."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([kmg]?)(?:i?b)?", text.strip().lower())
    if not match or not float(match[1]):
        raise UsageError(f"memory-cap={text} is not allowed: give an amount such as 4G or 512M")
    return int(float(match[1]) * UNITS[match[2]])
