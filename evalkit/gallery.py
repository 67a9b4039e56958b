"""Shows the reports in a folder's folders: writes its README.md, and the parts of another one that it marks; computes nothing.

A part of a text between `<!-- results: NAME -->` and `<!-- end -->` is what the report of NAME says in short.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import UsageError
from .formats import markdown
from .perf.records import KIND as PERF
from .perf.records import KINDS
from .perf.sections import sections
from .retention.records import KIND as RETENTION
from .retention.sections import by_bucket
from .store import write

HEAD = """# Results

Written by `evalkit gallery`; every folder holds a report as `evalkit report RUN --out FOLDER` makes it (report.md, .csv, .json and
plots), and names the command that made its run.
"""
MARK = re.compile(r"(<!-- results: ([\w.-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Entry = dict[str, Any]


def show(folder: Path, readme: Path | None = None) -> list[Path]:
    """Write `folder/README.md`, and the marked parts of `readme`; return what was written."""
    names = sorted(path.parent.name for path in folder.glob("*/report.json"))
    if not names:
        raise UsageError(f"{folder} holds no reports: give a folder whose folders `evalkit report RUN --out` wrote")
    if readme is not None and not readme.is_file():
        raise UsageError(f"{readme} does not exist: give a text with marked parts")
    parts = [f"## {name}\n\n{short(folder, name, '')}" for name in names]
    write(folder / "README.md", "\n".join([HEAD, *parts]))
    if readme is None:
        return [folder / "README.md"]
    text = readme.read_text("utf-8")
    write(readme, MARK.sub(lambda found: f"{found[1]}{short(folder, found[2], f'{folder.name}/')}{found[4]}", text))
    return [folder / "README.md", readme]


def short(folder: Path, name: str, at: str) -> str:
    """Return what the report `name` says in short: its title, its table, its curves, its command; links start from `at`.

    Raises UsageError for a report that is not there, cut short, or none of evalkit's.
    """
    where = folder / name
    mend = f"write it with `evalkit report RUN --out {where}`"
    try:
        told = json.loads((where / "report.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{where} holds no whole report ({error}): {mend}") from None
    try:
        tell, kinds = TOLD.get(told.get("kind"), (_sweep, ("accuracy",)))
        lines = [f"{told['title']}.", "", *tell(told)]
        command = told["aside"]["command"]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where / 'report.json'} is no report of evalkit's ({type(error).__name__}: {error}): {mend}") from None
    figures = [path for kind in kinds for path in sorted(where.glob(f"{kind}-*.svg"))]
    lines += [f"![{name}]({at}{name}/{path.name})\n" for path in figures]
    return "\n".join([*lines, f"Made by `{command}`; [the whole report]({at}{name}/report.md) says how to read it.", ""])


# Retention


def _retention(told: Entry) -> Iterator[str]:
    """What was asked of which model, and the table of accuracy by context length."""
    model, protocol = (told["provenance"][part] for part in ("model", "protocol"))
    yield from (f"{note}\n" for note in told["notes"])
    counted = ", ".join(str(model[name]) for name in ("dtype", "device", "lengths") if model.get(name))
    yield (
        f"{model['name']} ({counted}), `replies={protocol['replies']}`, `source={protocol['source']}`, "
        f"asked after turns {', '.join(map(str, told['turns']))}; accuracy in percent, in brackets the difference to full in points:\n"
    )
    section = by_bucket(told)
    yield markdown([section]).partition("\n\n")[2]


# Perf


def _perf(told: Entry) -> Iterator[str]:
    """What was asked on which machine, and the first tables: what was measured, and its ratio to full."""
    head, *tables = sections(told)
    yield from (f"{line}\n" for line in head.lines)
    yield markdown([replace(table, level=4) for table in tables[:2]])


# What is told of a run by its kind, and what its figures are called; all else is a sweep
TOLD: Mapping[Any, tuple[Callable[[Entry], Iterator[str]], tuple[str, ...]]] = {
    RETENTION: (_retention, ("buckets", "turns")),
    PERF: (_perf, KINDS),
}


# Sweeps


def _sweep(told: Entry) -> Iterator[str]:
    """A table for each model and protocol."""
    for group in told["groups"]:
        yield from (*_group(told, group), "")


def _group(told: Entry, group: Entry) -> list[str]:
    """One model under one protocol: a line for each cell, a column for each task."""
    model = {model["name"]: model for model in told["provenance"]["models"]}[group["model"]]
    head = [
        "policy@budget",
        *(f"{task['name']} (n={task['n']})" for task in group["tasks"]),
        "mean",
        "to full",
        "held",
        "read",
        "acted",
    ]
    rows = [_row(cell, [task["name"] for task in group["tasks"]]) for cell in group["cells"]]
    return [
        f"{model['name']} ({model['dtype']}, {model['device']}), `protocol={group['protocol']}`, accuracy and standard error in percent:",
        "",
        *(f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows)),
    ]


def _row(cell: Entry, tasks: list[str]) -> list[str]:
    entries, mean = [cell["tasks"][task] for task in tasks], cell["mean"]
    shares = [f"{100 * cell[what]:.0f} %" for what in ("held", "read", "acted")]
    return [
        f"{cell['label']}{' †' if cell['greyed'] else ''}{' ‡' if cell['floor'] else ''}",
        *(f"{_points(entry)}{'*' if entry['significant'] else ''}" for entry in entries),
        _points(mean),
        "" if mean["difference"] is None else _difference(mean),
        *shares,
    ]


def _points(entry: Entry) -> str:
    return f"{100 * entry['accuracy']:.1f} ±{100 * entry['stderr']:.1f}"


def _difference(mean: Entry) -> str:
    """The mean difference to full and its 95 % interval, in percentage points."""
    value, low, high = (100 * mean[name] for name in ("difference", "difference_low", "difference_high"))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}] {'?' if mean['verdict'] == 'inconclusive' else mean['verdict']}"
