"""Writes sections of tables and sentences as Markdown, LaTeX or to a terminal, and rows as CSV or JSON; knows nothing of what they say."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UsageError, nearest
from .store import write

FORMATS = ("terminal", "md", "csv", "latex", "json")


class Word(NamedTuple):
    """What stands in a cell of a table, and in which tone a terminal shows it: good, bad, dim or plain."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Section:
    """A title of level 1, 2 or 3, a table (or none), and lines under it. The first column of a table is text, the others are figures."""

    title: str
    level: int = 3
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Word]] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Told:
    """All that can be said of a report or a comparison: sections for people, rows for CSV, a value for JSON."""

    sections: Sequence[Section]
    rows: Sequence[Mapping[str, Any]]
    value: Mapping[str, Any]

    def text(self, kind: str) -> str:
        """Return it as `kind`, a format but terminal."""
        match kind:
            case "md":
                return markdown(self.sections)
            case "latex":
                return latex(self.sections)
            case "csv":
                return as_csv(self.rows)
            case _:
                return as_json(self.value)

    def put(self, kind: str) -> None:
        """Print it, and nothing else, to standard output."""
        if kind == "terminal":
            show(self.sections)
        else:
            sys.stdout.write(self.text(kind))

    def save(self, folder: Path) -> list[Path]:
        """Write report.md, report.csv and report.json into `folder`; return their paths."""
        paths = [folder / f"report.{kind}" for kind in ("md", "csv", "json")]
        for path in paths:
            write(path, self.text(path.suffix[1:]))
        return paths


def chosen(kind: str) -> str:
    """Return a format's name. Raises UsageError, with the nearest name, for what is none."""
    if kind not in FORMATS:
        raise UsageError(f"unknown format {kind!r}{nearest(kind, FORMATS)}: give {', '.join(FORMATS)}")
    return kind


def markdown(sections: Sequence[Section]) -> str:
    """Return sections as Markdown."""
    return "\n".join(_markdown(section) for section in sections)


def _markdown(section: Section) -> str:
    lines = [f"{'#' * section.level} {_inert(section.title)}", ""]
    if section.header:
        lines += [_piped(section.header), "|---|" + "---:|" * (len(section.header) - 1)]
        lines += [*(_piped([word.text for word in row]) for row in section.rows), ""]
    if section.lines:
        lines += [*(f"- {_inert(line)}" for line in section.lines), ""]
    return "\n".join(lines)


def _piped(words: Sequence[str]) -> str:
    return f"| {' | '.join(_inert(word) for word in words)} |"


def _inert(text: str) -> str:
    """Text that Markdown takes for neither a table's edge nor HTML."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "†": r"\textdagger{}",
    "‡": r"\textdaggerdbl{}",
}  # fmt: skip
HEADINGS = {1: "section*", 2: "subsection*", 3: "subsubsection*"}


def latex(sections: Sequence[Section]) -> str:
    """Return sections as LaTeX to be input by a document that uses booktabs."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(_latex(section) for section in sections)


def _latex(section: Section) -> str:
    lines = [rf"\{HEADINGS[section.level]}{{{escaped(section.title)}}}", ""]
    if section.header:
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(section.header) - 1)}}}", r"\toprule", _row(section.header), r"\midrule"]
        lines += [*(_row([word.text for word in row]) for row in section.rows), r"\bottomrule", r"\end{tabular}", ""]
    if section.lines:
        lines += [r"\begin{itemize}", *(rf"\item {escaped(line)}" for line in section.lines), r"\end{itemize}", ""]
    return "\n".join(lines)


def _row(words: Sequence[str]) -> str:
    return " & ".join(escaped(word) for word in words) + r" \\"


def escaped(text: str) -> str:
    """Return text that LaTeX sets as it stands; a minus before a figure is set as one."""
    safe = "".join(LATEX.get(letter, letter) for letter in " ".join(text.split()))
    return re.sub(r"(?<![\w}])([+-])(?=\d)", r"$\1$", safe)


TONES = {"good": "green", "bad": "red", "dim": "dim", "": ""}
WIDE = 160  # columns where no terminal says how many it has


def show(sections: Sequence[Section]) -> None:
    """Print sections to standard output, in colour where that is a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDE)
    for section in sections:
        console.print(Text(section.title, "bold" if section.level > 1 else "bold underline"))
        if section.header:
            table = Table()
            for place, name in enumerate(section.header):
                table.add_column(Text(name), justify="right" if place else "left", no_wrap=not place)
            for row in section.rows:
                table.add_row(*(Text(word.text, TONES[word.tone]) for word in row))
            console.print(table)
        for line in section.lines:
            console.print(Text(line))
        console.print()


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows, which all have the first one's fields, under a line with their names; None stands empty. No rows, no text."""
    if not rows:
        return ""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def as_json(value: Mapping[str, Any]) -> str:
    """Return JSON, which knows no NaN."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def amount(count: int) -> str:
    """Say a number of bytes in four figures."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.4g} {unit}"
    return f"{count} B" if count else "-"
