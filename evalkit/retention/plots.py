"""Draws a retention report as PNG and SVG: accuracy by context length and by turn, and what of the fact is held. Knows its shape alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..figures import PANEL, band, legend, looks, small_multiples, style, write
from ..store import slug
from .report import ALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Entry = Mapping[str, Any]

FULL: Mapping[str, Any] = {"color": "black", "linestyle": "--", "marker": "x", "markersize": 4, "linewidth": 1}
FLOOR: Mapping[str, Any] = {"color": "0.5", "linestyle": ":", "linewidth": 1}
APART = 0.5  # of the way between two context lengths, taken up by the cells that stand side by side
MARGIN = 4  # percent below 0 and above 100
NAME = 2.0  # inches that a name in the legend takes


class Point(NamedTuple):
    """Where a cell stands: a turn or a bucket's place, and a share with its interval in percent; without one, of no width."""

    x: float
    y: float
    low: float
    high: float


class Measure(NamedTuple):
    """What is drawn against turns."""

    file: str  # what the figure's files are called after
    label: str
    value: str  # a field of a row
    limits: tuple[str, str]  # of its interval; the value itself where it has none


ACCURACY = Measure("turns", "accuracy (%)", "accuracy", ("low", "high"))
SURVIVAL = Measure("survival", "of the fact held (%)", "survival", ("survival", "survival"))


def save(report: Entry, folder: Path) -> list[Path]:
    """Write the figures into `folder` (made if need be) and return the files' paths; those of which nothing is known are left out.

    `report` is the dict of `Report.as_dict`. The same report gives the same bytes. Raises UsageError without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = slug(report["provenance"]["model"]["name"])
    with style():
        written = write(by_bucket(report), folder / f"buckets-{name}") if report["rows"] else []
        for measure in (ACCURACY, SURVIVAL):
            if any(row[measure.value] is not None for row in report["rows"]):
                written += write(by_turn(report, measure), folder / f"{measure.file}-{name}")
    return written


def by_bucket(report: Entry) -> Figure:
    """Draw accuracy over all turns against context length, the cells side by side with their intervals."""
    from matplotlib.figure import Figure

    names = [bucket["name"] for bucket in report["buckets"]]
    figure = Figure(figsize=(2 * PANEL[0], PANEL[1] + 1), layout="constrained")
    panel = figure.subplots()
    for number, cell in enumerate(report["cells"]):
        shift = APART * ((number + 0.5) / len(report["cells"]) - 0.5)
        points = _points(report, cell, ACCURACY, {(name, ALL): place + shift for place, name in enumerate(names)})
        _draw(panel, points, report, cell)
        for point in points:
            panel.vlines(point.x, point.low, point.high, color=_drawn(report, cell)["color"], linewidth=0.8)
    panel.set_xticks(range(len(names)), names)
    panel.set_xlim(-0.5, len(names) - 0.5)
    _finish(figure, [panel], report, "conversations by length, in tokens", ACCURACY.label)
    return figure


def by_turn(report: Entry, measure: Measure) -> Figure:
    """Draw a measure against turns, with its band: a panel for each bucket."""
    buckets = report["buckets"]
    figure, panels = small_multiples(len(buckets))
    for panel, bucket in zip(panels, buckets, strict=True):
        panel.set_title(f"{bucket['name']}, {bucket['conversations']} conversations", fontsize=8, fontweight="bold")
        for cell in report["cells"]:
            points = _points(report, cell, measure, {(bucket["name"], turn): turn for turn in report["turns"]})
            if not cell["control"]:
                low, high = [point.low for point in points], [point.high for point in points]
                colour = _drawn(report, cell)["color"]
                band(panel, [point.x for point in points], low, high, colour, bands=len(report["cells"]))
            _draw(panel, points, report, cell)
        panel.set_xticks(report["turns"])
    _finish(figure, panels, report, "turn", measure.label)
    return figure


def _draw(panel: Axes, points: Sequence[Point], report: Entry, cell: Entry) -> None:
    """A cell's line; one that was not measured has none, nor a place in the legend."""
    if points:
        label = f"{cell['label']} (the floor)" if cell["control"] else cell["label"]
        panel.plot([point.x for point in points], [point.y for point in points], **_drawn(report, cell), label=label)


def _finish(figure: Figure, panels: Sequence[Axes], report: Entry, across: str, up: str) -> None:
    """Give the panels one scale, and the figure its labels and its legend."""
    for panel in panels:
        panel.set_ylim(-MARGIN, 100 + MARGIN)
    figure.supxlabel(across, fontsize=8)
    figure.supylabel(up, fontsize=8)
    legend(figure, panels, report["title"], columns=max(1, round(figure.get_figwidth() / NAME)))


# What the report says


def _drawn(report: Entry, cell: Entry) -> Mapping[str, Any]:
    """How a cell's line looks: full's and the floor's as in every figure, a policy's by its colour and marker."""
    if cell["full"] or cell["control"]:
        return FULL if cell["full"] else FLOOR
    policies = looks([each["label"] for each in report["cells"] if not (each["full"] or each["control"])])
    return {**policies[cell["label"]].drawn, "linewidth": 1.2}


def _points(report: Entry, cell: Entry, measure: Measure, places: Mapping[tuple[str, int | str], float]) -> list[Point]:
    """A cell's points at those of some (bucket, turn) where it was measured, each at its place."""
    mine = [row for row in report["rows"] if (row["policy"], row["budget"]) == (cell["policy"], cell["budget"])]
    rows = {(row["bucket"], row["turn"]): row for row in mine if row[measure.value] is not None}
    return [_point(x, rows[at], measure) for at, x in places.items() if at in rows]


def _point(x: float, row: Entry, measure: Measure) -> Point:
    value = row[measure.value]
    low, high = (value if row[name] is None else row[name] for name in measure.limits)
    return Point(x, 100 * value, 100 * low, 100 * high)
