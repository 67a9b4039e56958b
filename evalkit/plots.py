"""Draws a report's curves as PNG and SVG with matplotlib; knows the report's shape, and nothing of runs and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures import Look, band, legend, looks, small_multiples, style, write
from .store import slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Entry = Mapping[str, Any]

KNEE, HOLLOW = "smallest budget that is ok", "hollow: acted on few prompts"  # explained last in a legend
RING: Mapping[str, Any] = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": "black", "markeredgewidth": 0.8}
WIDTH = 1.96  # standard errors on each side of a 95 % interval
HALF = 0.5  # of the prompts: a policy that acted on fewer tells little


class Point(NamedTuple):
    """A cell's accuracy on one task or on average; accuracies in percent, `x` a share in percent or a number of tokens."""

    x: float
    y: float
    low: float
    high: float
    greyed: bool
    budget: str


@dataclass(frozen=True)
class Axis:
    """What accuracy is drawn against."""

    file: str  # what the figure's files are called after
    label: str
    of: Callable[[Entry, str], float | None]  # of a cell and a task (or "mean")


def save(report: Entry, folder: Path) -> list[Path]:
    """Write the figures of every model and protocol into `folder` (made if need be) and return the files' paths.

    `report` is the dict of `Report.as_dict`. The same report gives the same bytes. Raises UsageError without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with style():
        for group in report["groups"]:
            name = slug(f"{group['model']}-{group['protocol']}")
            for axis in axes_of(group):
                written += write(curves(group, axis), folder / f"{axis.file}-{name}")
            written += write(fronts(group), folder / f"pareto-{name}")
    return written


# Curves: accuracy of every policy against what it was given, held or read


def axes_of(group: Entry) -> list[Axis]:
    """Return the three horizontal axes; a budget in tokens stands among shares where it holds as much."""
    shares = any(cell["share"] is not None for cell in _policy_cells(group))
    budget = _share if shares else _tokens
    return [
        Axis("accuracy", "budget (% of the full cache)" if shares else "budget (tokens)", budget),
        Axis("held", "bytes held (% of the full cache)", lambda cell, task: _percent(_at(cell, task, "held_bytes"))),
        Axis("read", "entries read (% of the full cache)", lambda cell, task: _percent(_at(cell, task, "read"))),
    ]


def _share(cell: Entry, task: str) -> float | None:
    return _percent(_at(cell, task, "held") if cell["share"] is None else cell["share"])


def _tokens(cell: Entry, task: str) -> float | None:
    return float(cell["budget"])


def _at(cell: Entry, task: str, name: str) -> float | None:
    """A cost of a cell on one task, or on all of them."""
    value: float | None = cell[name] if task == "mean" else cell["tasks"][task][name]
    return value


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def curves(group: Entry, axis: Axis) -> Figure:
    """Draw small multiples: the mean and every task, one line for each policy, and one legend."""
    names = ["mean", *(task["name"] for task in group["tasks"])]
    figure, panels = small_multiples(len(names))
    for panel, name in zip(panels, names, strict=True):
        _panel(panel, group, axis, name)
    figure.supxlabel(axis.label, fontsize=8)
    figure.supylabel("accuracy (%)", fontsize=8)
    _legend(figure, panels, group)
    return figure


def _panel(panel: Axes, group: Entry, axis: Axis, task: str) -> None:
    """One task: full's line with its band, the chance line, and every policy."""
    panel.set_title(task, fontsize=8, fontweight="bold")
    panel.set_xscale("log")
    for cell in (cell for cell in group["cells"] if cell["full"]):
        _draw_full(panel, cell, task)
    chance = [entry["chance"] for entry in group["tasks"] if task in ("mean", entry["name"])]
    panel.axhline(100 * sum(chance) / len(chance), color="0.5", linestyle=":", linewidth=1, label="chance")
    told = _looks(group)
    for policy, look in told.items():
        points = sorted(_points(group, policy, axis, task))
        _draw_policy(panel, points, policy, look, bands=len(told))
        _draw_knee(panel, [point for point in points if point.budget == _knee(group, policy, task)])
    _ticks(panel)


def _draw_full(panel: Axes, cell: Entry, task: str) -> None:
    accuracy, low, high = _interval(cell, task)
    panel.axhline(accuracy, color="black", linestyle="--", linewidth=1, label="full")
    panel.axhspan(low, high, color="black", alpha=0.08, linewidth=0)


def _draw_policy(panel: Axes, points: Sequence[Point], policy: str, look: Look, bands: int) -> None:
    """A policy's line, band and markers, hollow where it hardly acted."""
    xs = [point.x for point in points]
    low, high = [point.low for point in points], [point.high for point in points]
    band(panel, xs, low, high, look.colour, bands)
    panel.plot(xs, [point.y for point in points], **look.drawn, linewidth=1.2, label=policy)
    if grey := [point for point in points if point.greyed]:
        hollow = {**look.drawn, "markerfacecolor": "white", "linestyle": "none"}
        panel.plot([point.x for point in grey], [point.y for point in grey], **hollow, label=HOLLOW)


def _draw_knee(panel: Axes, points: Sequence[Point]) -> None:
    """A ring around the smallest budget that is ok."""
    for point in points:
        panel.plot(point.x, point.y, "o", label=KNEE, **RING)


def _ticks(panel: Axes) -> None:
    """Plain numbers at round places: 1, 2, 5, 10."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _legend(figure: Figure, panels: Sequence[Axes], group: Entry) -> None:
    """One legend; it explains rings and hollow marks only where there are any."""
    legend(figure, panels, f"{group['model']}, protocol {group['protocol']}", (KNEE, HOLLOW))


# Fronts: which cells no other beats in both accuracy and cost


def fronts(group: Entry) -> Figure:
    """Draw mean accuracy against bytes held, and seconds where they are known, with the undominated cells joined and named."""
    from matplotlib.figure import Figure

    costs = [("bytes", "held_bytes", "bytes held (% of the full cache)", 100.0)]
    if any(cell["seconds"] for cell in group["cells"]):
        costs.append(("seconds", "seconds", "seconds", 1.0))
    figure = Figure(figsize=(4.8 * len(costs), 3.8), layout="constrained")
    panels = figure.subplots(1, len(costs), squeeze=False)[0]
    for panel, (front, cost, label, scale) in zip(panels, costs, strict=True):
        _front(panel, group, group["pareto"][front], cost, scale)
        panel.set_xlabel(label)
        _ticks(panel)
    panels[0].set_ylabel("mean accuracy (%)")
    _legend(figure, panels, group)
    return figure


def _front(panel: Axes, group: Entry, front: Sequence[str], cost: str, scale: float) -> None:
    """All cells as points, those of the front joined by steps and named."""
    panel.set_xscale("log")
    place = {cell["key"]: (scale * cell[cost], 100 * cell["mean"]["accuracy"]) for cell in group["cells"] if cell[cost]}
    steps = sorted(place[key] for key in front if key in place)
    panel.plot([x for x, _ in steps], [y for _, y in steps], color="0.4", linewidth=1, drawstyle="steps-post", label="front")
    for policy, look in {**_looks(group), "full": Look("black", "x")}.items():
        mine = [place[cell["key"]] for cell in group["cells"] if cell["policy"] == policy and cell["key"] in place]
        panel.plot([x for x, _ in mine], [y for _, y in mine], **look.drawn, linestyle="none", label=policy)
    # The first of several in one place: full's, where others are the full cache too.
    names = {place[cell["key"]]: cell["label"] for cell in reversed(group["cells"]) if cell["key"] in {*front} & {*place}}
    for (x, y), name in names.items():
        right = x == max(cost for cost, _ in place.values())
        beside, end = ((-5, -8), "right") if right else ((5, -8), "left")
        panel.annotate(name, (x, y), xytext=beside, textcoords="offset points", ha=end, fontsize=6)


# What the report says


def _policy_cells(group: Entry) -> list[Entry]:
    return [cell for cell in group["cells"] if not cell["full"]]


def _policies(group: Entry) -> list[str]:
    return list(dict.fromkeys(cell["policy"] for cell in _policy_cells(group)))


def _looks(group: Entry) -> dict[str, Look]:
    return looks(_policies(group))


def _knee(group: Entry, policy: str, task: str) -> str | None:
    found = (knee["budget"] for knee in group["knees"] if (knee["policy"], knee["task"]) == (policy, task))
    return next(found, None)


def _points(group: Entry, policy: str, axis: Axis, task: str) -> Iterator[Point]:
    """Where a policy's cells lie; those without a place on a logarithmic axis have none."""
    for cell in _policy_cells(group):
        x = axis.of(cell, task) if cell["policy"] == policy else None
        if x:
            yield Point(x, *_interval(cell, task), _hardly_acted(cell, task), cell["budget"])


def _hardly_acted(cell: Entry, task: str) -> bool:
    """Whether the policy acted on fewer than half of the prompts; for the mean, of any task's."""
    if task == "mean":
        return bool(cell["greyed"])
    return bool(cell["share"] != 1 and (cell["tasks"][task]["acted"] or 0) < HALF)


def _interval(cell: Entry, task: str) -> tuple[float, float, float]:
    """Accuracy with its 95 % limits, in percent; where they are undefined, without any width."""
    entry = cell["mean"] if task == "mean" else cell["tasks"][task]
    accuracy, half = entry["accuracy"], WIDTH * (entry["stderr"] or 0)
    low, high = entry.get("low"), entry.get("high")
    return 100 * accuracy, 100 * (accuracy - half if low is None else low), 100 * (accuracy + half if high is None else high)
