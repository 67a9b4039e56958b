"""Makes of a perf run what tables and plots show: medians and ranges over the rounds, ratios to full. Needs no torch, knows no model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..naming import placeless
from ..store import ASIDE, Store
from .records import KIND, OK, Point, Points

GIB = 1 << 30
Value = Callable[[Point], float]


def held_bytes(point: Point) -> float:
    """All bytes held once the prompts are in, wherever they lie."""
    return float(sum(point["held"]["device_bytes"]) + sum(point["held"]["host_bytes"]))


def taken(point: Point) -> float:
    """The most memory beyond that of the model: of the device, or of the process."""
    memory = point["memory"]
    return float(
        memory.get("device_peak_bytes", memory["host_peak_bytes"])
        - (0 if "device_peak_bytes" in memory else memory["host_start_bytes"])
    )


# What is read off a measurement; what was not counted raises KeyError or divides by zero, and is left out
VALUES: Mapping[str, Value] = {
    "ttft": lambda point: point["ttft"]["mean"],
    "tpot": lambda point: point["tpot"]["mean"],
    "tpot_p50": lambda point: point["tpot"]["p50"],
    "tpot_p99": lambda point: point["tpot"]["p99"],
    "latency": lambda point: point["seconds"]["prefill"] + point["seconds"]["decode"],
    "prefill": lambda point: point["seconds"]["prefill"],
    "decode": lambda point: point["seconds"]["decode"],
    "policy": lambda point: point["seconds"]["policy"],
    "attention": lambda point: point["seconds"]["attention"],
    "transfer": lambda point: point["seconds"]["transfer"],
    "model": lambda point: point["model_seconds"],
    "prefill_rate": lambda point: point["prefill_tokens_per_second"],
    "decode_rate": lambda point: point["decode_tokens_per_second"],
    "rate_per_gib": lambda point: point["decode_tokens_per_second"] * GIB / held_bytes(point),
    "memory_peak": lambda point: point["memory"].get("device_peak_bytes", point["memory"]["host_peak_bytes"]),
    "memory_taken": taken,
    "memory_mean": lambda point: point["memory"]["host_mean_bytes"],
    "held_entries": lambda point: sum(point["held"]["entries"]),
    "held_device": lambda point: sum(point["held"]["device_bytes"]),
    "held_host": lambda point: sum(point["held"]["host_bytes"]),
    "held": lambda point: point["tally"]["held"] / point["tally"]["span"],
    "read": lambda point: point["tally"]["read"] / point["tally"]["reach"],
    "read_per_query": lambda point: point["tally"]["read"] / point["tally"]["queries"],
    "fetched_per_query": lambda point: point["tally"]["fetched_bytes"] / point["tally"]["queries"],
    "attention_kept": lambda point: point["attention_kept"],
}  # fmt: skip
COMPARED = {"ttft": "ttft", "batch": "decode_rate", "decode": "tpot"}  # what is compared with full, by what is asked


@dataclass(frozen=True)
class Report:
    """A run in numbers: a row for each cell and place."""

    manifest: Mapping[str, Any]
    points: Sequence[Point]
    missing: int  # rounds
    digest: str

    @classmethod
    def of(cls, store: Points) -> Report:
        """Read a run."""
        return cls(store.manifest, list(store.points()), len(store.missing()), store.digest)

    @property
    def kind(self) -> str:
        return str(self.manifest["asked"]["kind"])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each place and cell that were measured."""
        places, labels = self.manifest["asked"]["over"], [cell["label"] for cell in self.manifest["cells"]]
        return [row for at in places for label in labels if (row := self.row(label, at))]

    def row(self, label: str, at: int) -> dict[str, Any]:
        """Return a cell's medians at a place with the lowest and the highest, and its ratio to full; None for what was not counted."""
        own = self.at(label, at)
        if not own:
            return {}
        done = [point for point in own.values() if point["outcome"] == OK]
        found: dict[str, Any] = {"cell": label, "at": at, "n": len(done), "out_of_memory": len(own) - len(done)}
        for name, value in VALUES.items():
            found |= spread(name, [one for point in done if (one := known(value, point)) is not None])
        return found | spread("ratio", self.ratios(label, at))

    def at(self, label: str, at: int) -> dict[int, Point]:
        """Return a cell's measurements at a place, by repeat."""
        return {point["repeat"]: point for point in self.points if (point["cell"], point["at"]) == (label, at)}

    def ratios(self, label: str, at: int) -> list[float]:
        """Return what is compared of a cell, over full's of the same round."""
        value, full = VALUES[COMPARED[self.kind]], self.at(self.manifest["cells"][0]["label"], at)
        pairs = [
            (known(value, point), known(value, full[repeat])) for repeat, point in self.at(label, at).items() if repeat in full
        ]
        return [one / whole for one, whole in pairs if one is not None and whole]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON holds it."""
        aside = {"schema", "kind", *ASIDE}
        return {
            "kind": KIND,
            "title": f"{TITLES[self.kind]}, {self.manifest['model']['name']}",
            "what": self.kind,
            "over": self.manifest["asked"]["over"],
            "cells": [cell["label"] for cell in self.manifest["cells"]],
            "rows": self.rows,
            "missing_rounds": self.missing,
            "provenance": placeless(
                {"run": self.digest, **{name: value for name, value in self.manifest.items() if name not in aside}}
            ),
            "aside": placeless({name: self.manifest.get(name) for name in sorted(ASIDE - {"shown"})}),
        }


TITLES = {"ttft": "Time to first token by prompt length", "batch": "Throughput by batch", "decode": "Decoding by output length"}


def known(value: Value, point: Point) -> float | None:
    """Return what is read off a measurement; None where it was not counted."""
    try:
        return value(point)
    except (KeyError, ZeroDivisionError):
        return None


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the median, the lowest and the highest under `name`; None of nothing."""
    found = (statistics.median(values), min(values), max(values)) if values else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))


def opened(folder: Path) -> Report | None:
    """Read a perf run; None for a folder that holds a run of another kind."""
    store = Store.open(folder)
    return Report.of(Points(folder, store.manifest)) if store.manifest.get("kind") == KIND else None
