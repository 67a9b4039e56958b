"""How every figure looks and is written: colours, markers, panels, bands, one legend, PNG and SVG. Knows nothing of what is drawn."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that colour-blind readers tell apart (Okabe and Ito, 2008), without the yellow that print loses; markers say the same.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C564B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h")
STYLE: Any = {
    "svg.hashsalt": "evalkit",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
}
PANEL = (3.0, 2.4)  # inches
ACROSS = 4  # panels side by side


class Look(NamedTuple):
    """How a policy is told from others, in colour and without."""

    colour: str
    marker: str

    @property
    def drawn(self) -> dict[str, Any]:
        return {"color": self.colour, "marker": self.marker, "markersize": 4}


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Return every policy's colour and marker; their numbers differ, so that not both come round at once."""
    return {name: Look(COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]) for number, name in enumerate(names)}


@contextmanager
def style() -> Iterator[None]:
    """Draw in our style, whatever the user's own settings are. Raises UsageError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("plots need matplotlib, which is not installed: pip install 'kv-evalkit[plots]'") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def small_multiples(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels of one size, a few to a row, and the panels."""
    from matplotlib.figure import Figure

    across = min(ACROSS, count)
    down = -(-count // across)
    figure = Figure(figsize=(PANEL[0] * across, PANEL[1] * down + 0.6), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for panel in panels[count:]:
        panel.set_axis_off()
    return figure, panels[:count]


def band(panel: Axes, xs: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str, bands: int) -> None:
    """Draw an interval around a line; the more bands lie on each other, the fainter each."""
    panel.fill_between(xs, low, high, color=colour, alpha=min(0.12, 0.4 / bands), linewidth=0)


def legend(figure: Figure, panels: Sequence[Axes], title: str, last: Collection[str] = (), columns: int = 6) -> None:
    """Put one legend over all panels, with what it is that was measured; labels among `last` stand at its end."""
    handles = {label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    labels = sorted(handles, key=last.__contains__)
    shown = [handles[label] for label in labels]
    figure.legend(shown, labels, loc="outside upper center", ncols=columns, frameon=False, title=title)


def write(figure: Figure, stem: Path) -> list[Path]:
    """Save a figure in both formats, without a date or a version in either; return the files' paths."""
    png, svg = (stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg"))
    figure.savefig(png, dpi=160, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]
