"""Figures: what they show of a report, that every run of the program draws the same bytes, and what is said without matplotlib."""

import copy
import sys
from pathlib import Path

import pytest

from evalkit.errors import UsageError
from evalkit.report import report
from evalkit.runs import Run
from tests.fakes import write_run

matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib, the extra `plots`")

from evalkit import plots  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict:
    """The report of a run with a smallest budget that is ok (h2o's mean at 50%)."""
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, documents=400, worse=0.1)
    return report(Run.load(folder)).as_dict()


@pytest.fixture(scope="module")
def saved(made, tmp_path_factory) -> list[Path]:
    return plots.save(made, tmp_path_factory.mktemp("figures") / "new")


@pytest.fixture
def group(made) -> dict:
    return copy.deepcopy(made["groups"][0])


def cells_of(group: dict, policy: str) -> list[dict]:
    return [cell for cell in group["cells"] if cell["policy"] == policy]


def lines(panel, label: str) -> list:
    return [line for line in panel.lines if line.get_label() == label]


def panel(group: dict, axis: str, name: str):
    """One panel of the figure against an axis."""
    (chosen,) = (each for each in plots.axes_of(group) if each.file == axis)
    return next(each for each in plots.curves(group, chosen).axes if each.get_title() == name)


def test_every_model_and_protocol_gets_its_figures_in_both_formats(saved) -> None:
    kinds = ("accuracy", "held", "read", "pareto")
    assert {path.name for path in saved} == {f"{kind}-smol-prompt.{suffix}" for kind in kinds for suffix in ("png", "svg")}
    assert {*saved} == {*saved[0].parent.iterdir()}


def test_the_same_report_gives_the_same_bytes_whatever_the_users_settings(made, saved, tmp_path) -> None:
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red"}):
        again = plots.save(made, tmp_path)
    assert [path.read_bytes() for path in saved] == [path.read_bytes() for path in again]


def test_a_line_goes_through_a_policys_accuracies(group) -> None:
    (line,) = lines(panel(group, "accuracy", "piqa"), "h2o")
    expected = sorted((100 * cell["share"], 100 * cell["tasks"]["piqa"]["accuracy"]) for cell in cells_of(group, "h2o"))
    assert list(zip(*line.get_data(), strict=True)) == [pytest.approx(place) for place in expected]


def test_the_other_axes_are_bytes_held_and_entries_read(group) -> None:
    for axis, cost in (("held", "held_bytes"), ("read", "read")):
        (line,) = lines(panel(group, axis, "mean"), "random")
        assert list(line.get_xdata()) == pytest.approx(sorted(100 * cell[cost] for cell in cells_of(group, "random")))


def test_full_and_chance_are_level_lines(group) -> None:
    drawn = panel(group, "accuracy", "hellaswag")
    (full,), (chance,) = lines(drawn, "full"), lines(drawn, "chance")
    (cell,) = cells_of(group, "full")
    assert set(full.get_ydata()) == {100 * cell["tasks"]["hellaswag"]["accuracy"]}
    assert set(chance.get_ydata()) == {25.0}


def test_a_ring_marks_the_smallest_budget_that_is_ok(group) -> None:
    (ring,) = lines(panel(group, "accuracy", "mean"), plots.KNEE)
    (knee,) = (knee for knee in group["knees"] if (knee["policy"], knee["task"]) == ("h2o", "mean"))
    (cell,) = (cell for cell in cells_of(group, "h2o") if cell["budget"] == knee["budget"])
    assert (*ring.get_xdata(), *ring.get_ydata()) == pytest.approx((100 * cell["share"], 100 * cell["mean"]["accuracy"]))
    assert lines(panel(group, "accuracy", "piqa"), plots.KNEE) == []


def test_points_of_a_policy_that_hardly_acted_are_hollow_on_that_task_and_the_mean(group) -> None:
    cell = cells_of(group, "h2o")[0]
    cell["tasks"]["piqa"]["acted"] = 0.25
    cell["greyed"] = True
    for name, hollow in (("piqa", 1), ("mean", 1), ("boolq", 0)):
        found = lines(panel(group, "accuracy", name), plots.HOLLOW)
        assert [len(line.get_xdata()) for line in found] == [1] * hollow, name
        assert all(line.get_markerfacecolor() == "white" for line in found)


def test_policies_differ_by_marker_and_not_by_colour_alone(group) -> None:
    more = [{**cell, "policy": f"policy {number}"} for number in range(12) for cell in cells_of(group, "h2o")]
    group["cells"] = cells_of(group, "full") + more
    drawn = [line for line in panel(group, "accuracy", "mean").lines if str(line.get_label()).startswith("policy")]
    assert len({line.get_marker() for line in drawn}) == 12


def test_budgets_in_tokens_have_an_axis_of_tokens(group) -> None:
    for cell, tokens in zip(cells_of(group, "h2o"), ("16", "64", "256", "1024"), strict=True):
        cell.update(share=None, budget=tokens)
    group["cells"] = cells_of(group, "full") + cells_of(group, "h2o")
    assert plots.axes_of(group)[0].label == "budget (tokens)"
    (line,) = lines(panel(group, "accuracy", "piqa"), "h2o")
    assert list(line.get_xdata()) == [16, 64, 256, 1024]


def test_among_shares_a_budget_in_tokens_stands_where_it_holds_as_much(group) -> None:
    cell = cells_of(group, "h2o")[0]
    cell.update(share=None, budget="64")
    (line,) = lines(panel(group, "accuracy", "piqa"), "h2o")
    assert 100 * cell["tasks"]["piqa"]["held"] in line.get_xdata()


def test_the_front_joins_and_names_the_cells_that_none_beats(group) -> None:
    (drawn,) = plots.fronts(group).axes
    (line,) = lines(drawn, "front")
    front = [cell for cell in group["cells"] if cell["key"] in group["pareto"]["bytes"]]
    assert sorted(line.get_xdata()) == pytest.approx(sorted(100 * cell["held_bytes"] for cell in front))
    assert {text.get_text() for text in drawn.texts} <= {cell["label"] for cell in front}
    assert drawn.texts


def test_a_front_against_seconds_is_drawn_where_there_are_seconds(group) -> None:
    for number, cell in enumerate(group["cells"]):
        cell["seconds"] = 10.0 + number
    group["pareto"]["seconds"] = [group["cells"][0]["key"]]
    assert [drawn.get_xlabel() for drawn in plots.fronts(group).axes] == ["bytes held (% of the full cache)", "seconds"]


def test_an_interval_that_is_undefined_has_no_width(group) -> None:
    (cell,) = cells_of(group, "full")
    cell["tasks"]["piqa"].update(stderr=None, low=None, high=None)
    accuracy = 100 * cell["tasks"]["piqa"]["accuracy"]
    (band,) = panel(group, "accuracy", "piqa").patches
    assert (band.get_y(), band.get_height()) == pytest.approx((accuracy, 0))


def test_without_matplotlib_one_line_says_what_to_install(made, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'kv-evalkit\[plots\]'"):
        plots.save(made, tmp_path)
