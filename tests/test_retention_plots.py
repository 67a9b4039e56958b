"""Figures of a retention run: what they show of its report, and that the same report draws the same bytes."""

import copy

import pytest

from evalkit.retention.report import opened
from tests.recalled import BUCKETS, TURNS, write_run

pytest.importorskip("matplotlib", reason="plots need matplotlib, the extra `plots`")

from evalkit.retention import plots


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("run") / "made"
    write_run(folder)
    return opened(folder).as_dict()


def line(panel, label: str):
    (found,) = (line for line in panel.lines if line.get_label() == label)
    return found


def rows(made: dict, policy: str, **at) -> list[dict]:
    return [row for row in made["rows"] if row["policy"] == policy and all(row[name] == value for name, value in at.items())]


def test_the_figures_are_written_in_both_formats_and_the_same_again(made, tmp_path):
    first, again = (plots.save(made, tmp_path / name) for name in ("first", "again"))
    assert [path.name for path in first] == [
        f"{name}-recall.{kind}" for name in ("buckets", "turns", "survival") for kind in ("png", "svg")
    ]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_accuracy_by_context_length_has_every_cell_with_its_interval(made):
    (panel,) = plots.by_bucket(made).axes
    assert [tick.get_text() for tick in panel.get_xticklabels()] == list(BUCKETS)
    for policy, label in (("full", "full"), ("h2o", "h2o 30 %"), ("control", "control (the floor)")):
        told = rows(made, policy, turn="all")
        assert list(line(panel, label).get_ydata()) == pytest.approx([100 * row["accuracy"] for row in told])
        drawn = [segment for bars in panel.collections for segment in bars.get_segments()]
        for x, row in zip(line(panel, label).get_xdata(), told, strict=True):
            assert any(segment.ravel() == pytest.approx([x, 100 * row["low"], x, 100 * row["high"]]) for segment in drawn)


def test_cells_stand_side_by_side(made):
    (panel,) = plots.by_bucket(made).axes
    places = [drawn.get_xdata()[0] for drawn in panel.lines]
    assert len(set(places)) == len(made["cells"]) and max(map(abs, places)) < 0.5


def test_accuracy_by_turn_has_a_panel_for_each_bucket_with_bands(made):
    panels = plots.by_turn(made, plots.ACCURACY).axes
    assert [panel.get_title() for panel in panels] == [f"{name}, 14 conversations" for name in BUCKETS]
    for panel, bucket in zip(panels, BUCKETS, strict=True):
        told = [row for row in rows(made, "random", bucket=bucket) if row["turn"] != "all"]
        drawn = line(panel, "random 30 %")
        assert list(drawn.get_xdata()) == list(TURNS)
        assert list(drawn.get_ydata()) == pytest.approx([100 * row["accuracy"] for row in told])
        assert len(panel.collections) == len(made["cells"]) - 1  # bands, but for the control


def test_the_floor_is_dotted_and_full_is_dashed_in_every_panel(made):
    for panel in plots.by_turn(made, plots.ACCURACY).axes:
        assert line(panel, "control (the floor)").get_linestyle() == ":"
        assert line(panel, "full").get_linestyle() == "--"


def test_survival_has_no_line_for_the_control(made):
    for panel in plots.by_turn(made, plots.SURVIVAL).axes:
        assert [drawn.get_label() for drawn in panel.lines] == ["full", "h2o 30 %", "random 30 %"]


def test_what_nobody_saw_is_not_drawn(made, tmp_path):
    unseen = copy.deepcopy(made)
    for row in unseen["rows"]:
        row["survival"] = None
    assert [path.stem for path in plots.save(unseen, tmp_path / "unseen")] == ["buckets-recall"] * 2 + ["turns-recall"] * 2
    assert plots.save({**made, "rows": []}, tmp_path / "empty") == []


def test_an_interval_that_is_undefined_has_no_width(made):
    changed = copy.deepcopy(made)
    for row in changed["rows"]:
        row.update(low=None, high=None)
    (panel,) = plots.by_bucket(changed).axes
    assert all(segment[0, 1] == segment[1, 1] for bars in panel.collections for segment in bars.get_segments())
