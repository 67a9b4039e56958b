"""Puts a perf report into words: a table for each thing that was measured, policies by places; computes nothing, knows no run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..formats import Section, Told, Word, amount
from ..sections import flat
from .records import SHORTEST
from .report import Report

Entry = Mapping[str, Any]


class Shown(NamedTuple):
    """A table: what is in it, in which words, and a line under it."""

    name: str
    title: str
    word: Callable[[float], str]
    line: str = ""
    ranged: bool = False  # whether the lowest and the highest stand beside the median


def seconds(value: float) -> str:
    """Say seconds in three figures."""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def rate(value: float) -> str:
    """Say tokens a second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: float) -> str:
    """Say a share."""
    return f"{100 * value:.1f} %"


def times(value: float) -> str:
    """Say a ratio."""
    return f"{value:.2f}"


def in_bytes(value: float) -> str:
    """Say a number of bytes."""
    return amount(round(value))


TTFT = Shown(
    "ttft",
    "time to first token",
    seconds,
    "From the prompt's first token to the answer's; in brackets the fastest and the slowest round.",
    True,
)
RATIO = Shown("ratio", "", times, "Median of the rounds' own ratios; in brackets the lowest and the highest.", True)
TPOT = Shown("tpot", "time per output token", seconds, "Mean of a run's tokens after the first.", True)
BREAKDOWN = (
    Shown("prefill", "seconds: prefill", seconds),
    Shown("decode", "seconds: decode", seconds),
    Shown("policy", "seconds: policy", seconds, "What policies do beside attending, in prefill and decode together."),
    Shown(
        "attention", "seconds: attention", seconds, "The attention of the prompt and of each step, the weights' products left out."
    ),
    Shown("transfer", "seconds: transfer", seconds, "Between host memory and the device."),
)
HELD = (
    Shown(
        "held_device",
        "bytes held on the device",
        in_bytes,
        "Once the prompts are in, scores and page bounds among them, at 2 bytes a number.",
    ),
    Shown("held_host", "bytes held in host memory", in_bytes),
    Shown(
        "held",
        "entries held, of the full cache's",
        percent,
        "As `evalkit size` reckons them: each run compares the two and stops where they differ.",
    ),
)
READ = (
    Shown("read", "entries read, of the full cache's", percent, "Mean over the steps."),
    Shown(
        "attention_kept",
        "attention kept",
        percent,
        "The share of the full cache's own attention that falls on what is read at the first step.",
    ),
)
MEMORY = Shown(
    "memory_taken_low",
    "most memory taken beyond the model's",
    in_bytes,
    "Of the CUDA device, or else of the process; the least of the rounds. A process's allocator keeps back some hundred MiB now and then: "
    "only larger differences are the policies'.",
)
RATES = Shown("decode_rate", "tokens a second while decoding", rate, "Of all sequences together.", True)
TABLES: Mapping[str, Sequence[Shown]] = {
    "ttft": (TTFT, RATIO._replace(title="time to first token, over full's"), MEMORY, *HELD, *READ, *BREAKDOWN),
    "batch": (
        RATES, RATIO._replace(title="tokens a second, over full's"), Shown("latency", "latency", seconds, "All prompts and answers.", True),
        TTFT, TPOT, Shown("rate_per_gib", "tokens a second for each GiB held", rate), MEMORY, *HELD, READ[0], *BREAKDOWN,
    ),
    "decode": (
        TPOT, RATIO._replace(title="time per output token, over full's"), Shown("tpot_p50", "time per output token: median", seconds),
        Shown("tpot_p99", "time per output token: 99th percentile", seconds), RATES, MEMORY, *HELD, *READ, *BREAKDOWN,
    ),
}  # fmt: skip
PLACES = {"ttft": "tokens", "batch": "sequences", "decode": "tokens said"}
OUT = "out of memory"


def told(report: Report) -> Told:
    """Return a report as every format has it."""
    value = report.as_dict()
    return Told(list(sections(value)), report.rows, value)


def sections(value: Entry) -> Iterator[Section]:
    """Yield the tables of a report (the dict of `Report.as_dict`) and what is to be said beside them."""
    unfinished = [f"Not finished: rounds missing: {value['missing_rounds']}."] if value["missing_rounds"] else []
    yield Section(value["title"], 1, lines=[*unfinished, *load(value), machine(value["provenance"]["hardware"])])
    for shown in TABLES[value["what"]]:
        if any(row[shown.name] for row in value["rows"]):
            yield grid(value, shown)
    yield Section(
        "Where it comes from",
        2,
        lines=[f"{name}: {each}" for name, each in flat({**value["provenance"], **value["aside"]}).items()],
    )


def grid(value: Entry, shown: Shown) -> Section:
    """A table with a row for each cell and a column for each place."""
    rows = {(row["cell"], row["at"]): row for row in value["rows"]}
    table = [[Word(cell), *(word(rows.get((cell, at)), shown) for at in value["over"])] for cell in value["cells"]]
    header = ["policy", *(f"{at} {PLACES[value['what']]}" for at in value["over"])]
    return Section(shown.title, 3, header, table, [shown.line] if shown.line else [])


def word(row: Entry | None, shown: Shown) -> Word:
    """A median, with its range where that is shown; empty where it was not counted."""
    if row is None:
        return Word("")
    if row["n"] == 0:
        return Word(OUT, "bad")
    if row[shown.name] is None:
        return Word("-")
    if not shown.ranged:
        return Word(shown.word(row[shown.name]))
    middle, low, high = (shown.word(row[f"{shown.name}{end}"]) for end in ("", "_low", "_high"))
    return Word(f"{middle} [{low}, {high}]")


def load(value: Entry) -> Iterator[str]:
    """Say what was asked of each cell."""
    asked = value["provenance"]["asked"]
    longest, output = asked["prompt_tokens"], asked["output_tokens"]
    prompts = {
        "ttft": "one prompt of each length, one token said",
        "batch": f"prompts of {longest // SHORTEST} to {longest} tokens, their lengths uniform, {output} tokens said after each",
        "decode": f"one prompt of {longest} tokens",
    }[value["what"]]
    cap = f", in {in_bytes(asked['memory_cap'])} of memory at most" if asked["memory_cap"] else ""
    yield f"{prompts[0].upper()}{prompts[1:]}{cap}; {asked['repeats']} rounds, in each of which every policy had its turn after a warm-up."


def machine(about: Entry) -> str:
    """Say what it was measured on."""
    gpu = f", {about['gpu']} ({in_bytes(about['gpu_memory_bytes'])})" if "gpu" in about else ""
    return f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads in use, {in_bytes(about['memory_bytes'])}{gpu}."
