"""Two runs beside each other: which cells and documents are matched, what is said of them, and what is refused."""

import csv
import io
import json

import pytest
from handmade import write_by_hand

from evalkit.compare import compare, told
from evalkit.errors import UsageError
from evalkit.runs import Run
from tests.recalled import write_run

FIRST = {"full@100%": {"piqa": [1] * 8}, "h2o@50%": {"piqa": [1, 1, 1, 1, 1, 1, 0, 0]}}
SECOND = {"full@100%": {"piqa": [1] * 8}, "h2o@50%": {"piqa": [1, 1, 0, 0, 0, 1, 1, 0]}}  # loses three, gains one


@pytest.fixture
def runs(tmp_path):
    """Write two runs, each with what is given for it, and load them."""

    def load(first=FIRST, second=SECOND, a=None, b=None):
        write_by_hand(tmp_path / "a", first, **(a or {}))
        write_by_hand(tmp_path / "b", second, **(b or {}))
        return Run.load(tmp_path / "a"), Run.load(tmp_path / "b")

    return load


def row(found, cell: str = "h2o@50%", task: str = "piqa") -> dict:
    (one,) = (row for row in found.rows if (row["cell_a"], row["task"]) == (cell, task))
    return one


def test_differences_are_the_seconds_minus_the_firsts(runs) -> None:
    found = row(compare(*runs()))
    assert (found["n"], found["accuracy_a"], found["accuracy_b"], found["difference"]) == (8, 6 / 8, 4 / 8, -2 / 8)
    assert (found["lost"], found["gained"], found["agreement"], found["furthest"]) == (3, 1, 4 / 8, 1.0)
    assert found["p"] == pytest.approx(2 * (1 + 4) / 2**4)
    assert found["p_holm"] == found["p"]  # full, equal to the last bit, is no hypothesis
    assert (found["significant"], found["verdict"]) == (False, "inconclusive")


def test_cells_that_are_equal_to_the_last_bit_are_ok(runs) -> None:
    found = row(compare(*runs()), "full@100%")
    assert (found["furthest"], found["p_holm"], found["verdict"]) == (0.0, None, "ok")


def test_p_is_adjusted_over_the_cells_of_a_task(runs) -> None:
    second = {"full@100%": {"piqa": [1] * 7 + [0]}, "h2o@50%": {"piqa": [0] * 8}}
    found = compare(*runs(second=second))
    assert row(found)["p"] == pytest.approx(2 / 2**6)
    assert row(found)["p_holm"] == pytest.approx(2 * 2 / 2**6)


def test_the_mean_is_over_the_tasks_both_have(runs) -> None:
    first = {"h2o@50%": {"piqa": [1] * 8, "copa": [1] * 4, "boolq": [1] * 4}}
    second = {"h2o@50%": {"copa": [1] * 4, "piqa": [0] * 4 + [1] * 4, "arc": [1] * 4}}
    found = compare(*runs(first, second))
    assert [row["task"] for row in found.rows] == ["piqa", "copa", "mean"]
    mean = row(found, task="mean")
    assert (mean["accuracy_a"], mean["accuracy_b"], mean["difference"]) == (1.0, 3 / 4, -1 / 4)
    assert mean["lost"] is None


def test_only_documents_that_both_asked_are_compared(runs) -> None:
    second = {"full@100%": {"piqa": [1, 1, 1, 1]}, "h2o@50%": {"piqa": [1, 0, 1, 1]}}
    found = row(compare(*runs(second=second, b={"doc_ids": [1, 4, 6, 7]})))
    assert (found["n"], found["accuracy_a"], found["accuracy_b"]) == (4, 2 / 4, 3 / 4)
    assert (found["lost"], found["gained"]) == (1, 2)


def test_the_smaller_run_may_be_the_first(runs) -> None:
    first = {"full@100%": {"piqa": [1, 1, 1, 1]}, "h2o@50%": {"piqa": [1, 0, 1, 1]}}
    found = row(compare(*runs(first=first, a={"doc_ids": [1, 4, 6, 7]})))
    assert (found["n"], found["accuracy_a"], found["accuracy_b"], found["lost"], found["gained"]) == (4, 3 / 4, 2 / 4, 1, 0)


def test_documents_of_one_passage_count_less(runs, tmp_path) -> None:
    alone = row(compare(*runs()))
    passages = {"piqa": ["a", "a", "b", "b", "c", "c", "d", "d"]}
    write_by_hand(tmp_path / "c", FIRST, clusters=passages)
    write_by_hand(tmp_path / "d", SECOND, clusters=passages)
    together = row(compare(Run.load(tmp_path / "c"), Run.load(tmp_path / "d")))
    assert together["difference"] == alone["difference"]
    assert together["difference_low"] < alone["difference_low"]


def test_other_prompts_are_refused_with_how_many_differ(runs) -> None:
    with pytest.raises(
        UsageError, match="piqa: 8 of 8 documents of one run are not in the other with the same question and prompt"
    ):
        compare(*runs(b={"questions": "other examples"}))


def test_documents_that_the_larger_run_lacks_are_refused(runs) -> None:
    second = {"full@100%": {"piqa": [1] * 4}, "h2o@50%": {"piqa": [1] * 4}}
    with pytest.raises(UsageError, match="piqa: 2 of 4 documents"):
        compare(*runs(second=second, b={"doc_ids": [0, 1, 98, 99]}))


def test_any_cell_of_one_can_be_compared_with_any_of_the_other(runs) -> None:
    found = compare(*runs(), cell_a="full@100%", cell_b="h2o@50%")
    assert [(row["cell_a"], row["cell_b"]) for row in found.rows] == [("full@100%", "h2o@50%")] * 2
    assert found.rows[0]["difference"] == -4 / 8
    assert "| full@100% / h2o@50% | piqa |" in told(found).text("md")


def test_one_cell_named_is_that_cell_in_both(runs) -> None:
    assert {(row["cell_a"], row["cell_b"]) for row in compare(*runs(), cell_b="h2o@50%").rows} == {("h2o@50%", "h2o@50%")}


def test_an_unknown_cell_is_told_the_nearest_one(runs) -> None:
    with pytest.raises(UsageError, match=r"has no cell 'h2o@5%' \(did you mean 'h2o@50%'\?\): it has full@100%, h2o@50%"):
        compare(*runs(), cell_a="h2o@5%")


def test_the_only_models_are_matched_whatever_their_names(runs) -> None:
    found = compare(*runs(b={"model": "smol-tuned"}))
    assert row(found)["difference"] == -2 / 8
    assert {"what": "models.smol.name", "a": "smol", "b": None} in found.identities


def test_runs_without_a_common_cell_are_refused(runs) -> None:
    with pytest.raises(UsageError, match="share no cell: smol/prompt/full@100%, smol/prompt/h2o@50% against smol/stream/full@100%"):
        compare(*runs(b={"protocol": "stream"}))


def test_runs_without_a_common_whole_task_are_refused(runs) -> None:
    with pytest.raises(UsageError, match="share no task that is whole in both"):
        compare(*runs(b={"skip": 1}))


def test_it_says_in_what_the_runs_differ(runs) -> None:
    found = compare(*runs(b={"versions": {"torch": "2.14.0"}, "created": "2027-01-01T00:00:00"}))
    assert found.identities == [{"what": "versions.torch", "a": "2.13.0", "b": "2.14.0"}]
    assert "| versions.torch | 2.13.0 | 2.14.0 |" in told(found).text("md")


def test_an_unfinished_run_is_named_and_its_whole_tasks_are_compared(runs, command, tmp_path) -> None:
    first = {"h2o@50%": {"piqa": [1] * 8, "copa": [1] * 4}}
    runs(first, first, b={"skip": 1})
    code, out, err = command("compare", tmp_path / "a", tmp_path / "b", "--format", "md")
    assert (code, err.count("\n")) == (0, 1)
    assert f"{tmp_path / 'b'} is not finished" in err
    assert "- B: Not finished: smol/prompt/copa lacks 1 pack and is left out." in out
    assert "| h2o@50% | piqa | 8 | 100.0 | 100.0 | +0.0 |" in out
    assert "copa |" not in out


@pytest.mark.parametrize("kind", ["terminal", "md", "csv", "latex", "json"])
def test_every_format_goes_to_standard_output_alone(runs, command, tmp_path, kind) -> None:
    runs()
    code, out, err = command("compare", tmp_path / "a", tmp_path / "b", "--format", kind)
    assert (code, err) == (0, "")
    assert "full@100" in out


def test_csv_and_json_have_every_number(runs) -> None:
    found = told(compare(*runs()))
    lines = list(csv.DictReader(io.StringIO(found.text("csv"))))
    assert [(line["cell_a"], line["task"]) for line in lines] == [
        ("full@100%", "piqa"), ("full@100%", "mean"), ("h2o@50%", "piqa"), ("h2o@50%", "mean"),
    ]  # fmt: skip
    assert float(lines[2]["difference"]) == -2 / 8
    value = json.loads(found.text("json"))
    assert value["rows"][2]["difference"] == -2 / 8
    assert value["identities"] == []


def test_a_wrong_folder_is_a_line(runs, command, tmp_path) -> None:
    runs()
    code, out, err = command("compare", tmp_path / "a", tmp_path / "c")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "holds no run" in err


def test_a_retention_run_is_refused_in_a_line(tmp_path) -> None:
    write_run(tmp_path / "recall")
    with pytest.raises(UsageError, match="recall holds a retention run, not a sweep: give the folder of one"):
        Run.load(tmp_path / "recall")
