"""Draws a perf report as PNG and SVG: what was measured against prompt length, batch or output length. Knows its shape alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..figures import Look, band, legend, looks, small_multiples, style, write
from ..store import slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Entry = Mapping[str, Any]


class Panel(NamedTuple):
    """What a panel shows: a field of the rows, in which unit."""

    name: str
    title: str
    scale: float = 1.0


HELD = Panel("held_device", "held on the device (MiB)", 1 / (1 << 20))
PANELS: Mapping[str, tuple[Panel, ...]] = {
    "ttft": (Panel("ttft", "time to first token (s)"), Panel("ratio", "over full's"), HELD),
    "batch": (Panel("decode_rate", "tokens a second"), Panel("latency", "latency (s)"), HELD),
    "decode": (Panel("tpot", "time per output token (ms)", 1000), Panel("ratio", "over full's"), Panel("decode_rate", "tokens a second")),
}  # fmt: skip
ALONG = {"ttft": "tokens of the prompt", "batch": "sequences", "decode": "tokens said"}
FULL = Look("black", "x")
OUT = "out of memory"


def save(report: Entry, folder: Path) -> list[Path]:
    """Write the figure into `folder` (made if need be) and return the files' paths; `report` is the dict of `Report.as_dict`."""
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        return (
            write(figure(report), folder / f"{report['what']}-{slug(report['provenance']['model']['name'])}")
            if report["rows"]
            else []
        )


def figure(report: Entry) -> Figure:
    """Draw a panel for each thing that was measured, a line for each cell with the range of its rounds."""
    shown = PANELS[report["what"]]
    drawn, panels = small_multiples(len(shown))
    told = {report["cells"][0]: FULL, **looks(report["cells"][1:])}
    for panel, what in zip(panels, shown, strict=True):
        panel.set_title(what.title, fontsize=8, fontweight="bold")
        panel.set_xscale("log", base=2)
        panel.set_xticks(report["over"], [f"{at // 1024}K" if at >= 1024 and at % 1024 == 0 else str(at) for at in report["over"]])
        if what.name in ("ttft", "held_device"):
            panel.set_yscale("log")
        for cell, look in told.items():
            line(panel, report, what, cell, look)
    drawn.supxlabel(ALONG[report["what"]], fontsize=8)
    legend(drawn, panels, report["title"], (OUT,), columns=4)
    return drawn


def line(panel: Axes, report: Entry, what: Panel, cell: str, look: Look) -> None:
    """Draw a cell's medians and range; a cross over the last one says that memory ran out at the next place."""
    rows = [row for row in report["rows"] if row["cell"] == cell]
    known = [row for row in rows if row[what.name]]
    xs = [row["at"] for row in known]
    ends = [[what.scale * row[f"{what.name}{end}"] for row in known] for end in ("", "_low", "_high")]
    if known:
        panel.plot(xs, ends[0], **look.drawn, linewidth=1.2, label=cell)
        band(panel, xs, ends[1], ends[2], look.colour, bands=len(report["cells"]))
    if known and (gone := [row["at"] for row in rows if not row["n"]]):
        panel.plot(gone[0], ends[0][-1], "X", color=look.colour, markersize=9, label=OUT)
