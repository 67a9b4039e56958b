"""Shows a run, of a sweep, of retention or of perf: prints it, writes a folder of tables and plots, and a page. Knows no number of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from . import report as reports
from . import sections
from .errors import UsageError
from .formats import chosen
from .perf import report as measured
from .perf import sections as timed
from .retention import sections as recalled
from .retention.report import Report, opened
from .runs import Run
from .store import write


def show(run: Path, kind: str, out: Path | None, html: Path | None, show_text: bool) -> Iterator[Path]:
    """Print a run in the format `kind`; write tables and plots into `out` and a page to `html`; yield the files written.

    With `show_text` the page of a retention run has questions and answers in it even where the conversations are not evalkit's own.
    """
    chosen(kind)
    if show_text and html is None:
        raise UsageError("--show-text says what a page shows: give --html FILE too, or leave it out")
    if (found := measured.opened(run)) is not None:
        return _measured(found, kind, out, refuse_page=html is not None)
    report = opened(run)
    if show_text and report is None:
        raise UsageError(
            f"--show-text is for retention runs, and {run} holds a sweep, whose page shows its documents: leave it out"
        )
    return _swept(Run.load(run), kind, out, html) if report is None else _retained(report, kind, out, html, show_text)


def tell_missing(run: Path, packs: int) -> None:
    """Say on standard error that a sweep's run is not finished, where packs are missing."""
    if packs:
        print(f"evalkit: {run} is not finished (packs missing: {packs}): only tasks that are whole are shown", file=sys.stderr)


def _swept(run: Run, kind: str, out: Path | None, html: Path | None) -> Iterator[Path]:
    report = reports.report(run)
    tell_missing(run.store.folder, len(report.incomplete))
    sections.told(report).put(kind)
    if out:
        from . import plots

        yield from (*sections.save(report, out), *plots.save(report.as_dict(), out))
    if html:
        from .html import page

        write(html, page(run, report.as_dict()))
        yield html


def _measured(report: measured.Report, kind: str, out: Path | None, *, refuse_page: bool) -> Iterator[Path]:
    if refuse_page:
        raise UsageError("--html is for sweeps and retention runs, and this is a perf run: give --out DIR for its tables and plots")
    told = timed.told(report)
    told.put(kind)
    if out:
        from .perf import plots

        yield from (*told.save(out), *plots.save(told.value, out))


def _retained(report: Report, kind: str, out: Path | None, html: Path | None, show_text: bool) -> Iterator[Path]:
    told = recalled.told(report)
    told.put(kind)
    if out:
        from .retention import plots

        yield from (*told.save(out), *plots.save(told.value, out))
    if html:
        from .retention.page import page

        write(html, page(report, show_text))
        yield html
