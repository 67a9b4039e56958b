"""What a report says of a run: numbers computed by hand, what is judged and what is not, what else is said."""

import json
import math
from dataclasses import replace

import pytest
from fakes import write_run
from handmade import write_by_hand

from evalkit.errors import UsageError
from evalkit.report import report
from evalkit.runs import Run
from evalkit.sections import told

# Eight documents. Of full's seven right answers h2o@10% loses all; h2o@50% loses three and gains the one full got wrong.
BY_HAND = {
    "full@100%": {"piqa": [1, 1, 1, 1, 1, 1, 1, 0], "copa": [1] * 8},
    "h2o@10%": {"piqa": [0, 0, 0, 0, 0, 0, 0, 0], "copa": [1] * 8},
    "h2o@50%": {"piqa": [1, 1, 1, 1, 0, 0, 0, 1], "copa": [1] * 8},
    "h2o@100%": {"piqa": [1, 1, 1, 1, 1, 1, 1, 0], "copa": [1] * 8},
}
MANY = 400  # documents, on which a policy that flips nothing is ok


@pytest.fixture
def by_hand(tmp_path):
    return told_of(tmp_path / "run", BY_HAND)


def told_of(folder, given, **more) -> dict:
    """The report on a run written by hand."""
    write_by_hand(folder, given, **more)
    return report(Run.load(folder)).as_dict()


def cell(found: dict, label: str, group: int = 0) -> dict:
    (one,) = (cell for cell in found["groups"][group]["cells"] if cell["label"] == label)
    return one


def knee(found: dict, policy: str, task: str) -> dict:
    (one,) = (knee for knee in found["groups"][0]["knees"] if (knee["policy"], knee["task"]) == (policy, task))
    return one


def told_text(folder, kind: str) -> str:
    return told(report(Run.load(folder))).text(kind)


# Numbers


def test_full_has_its_accuracy_with_lm_evals_error_and_no_difference(by_hand) -> None:
    full = cell(by_hand, "full@100%")["tasks"]["piqa"]
    assert full["n"] == 8
    assert full["accuracy"] == full["acc_norm"] == 7 / 8
    assert full["stderr"] == pytest.approx(math.sqrt((8 * 7 / 8 * 1 / 8) / 7 / 8))
    assert {full[name] for name in ("difference", "p", "p_holm", "significant", "verdict", "lost", "kl")} == {None}


def test_a_difference_to_full_is_what_the_hand_computes(by_hand) -> None:
    half = cell(by_hand, "h2o@50%")["tasks"]["piqa"]
    assert half["difference"] == (1 - 3) / 8
    assert (half["lost"], half["gained"]) == (3, 1)
    assert half["p"] == pytest.approx(2 * (1 + 4) / 2**4)  # of four flips at most one the other way
    assert half["agreement"] == 4 / 8
    likely = 1 / (1 + math.exp(-1))  # of two choices 1 nat apart
    assert half["kl"] == pytest.approx(4 / 8 * (2 * likely - 1))
    assert half["detectable"] == pytest.approx((1.959964 + 0.841621) * math.sqrt(4 / 8 / 8), rel=1e-6)
    assert half["verdict"] == "inconclusive"


def test_p_is_adjusted_over_a_tasks_cells_without_those_that_are_the_full_cache(by_hand) -> None:
    tenth, half, whole = (cell(by_hand, f"h2o@{budget}")["tasks"]["piqa"] for budget in ("10%", "50%", "100%"))
    assert tenth["p"] == pytest.approx(2 / 2**7)
    assert tenth["p_holm"] == pytest.approx(2 * 2 / 2**7)  # two cells, not three
    assert half["p_holm"] == pytest.approx(0.625)
    assert (tenth["significant"], tenth["verdict"]) == (True, "worse")
    assert (half["significant"], whole["significant"]) == (False, False)
    assert (whole["p_holm"], whole["verdict"]) == (None, "ok")


def test_a_cell_at_100_percent_that_picks_otherwise_is_judged_like_any_other(tmp_path) -> None:
    given = {"full@100%": {"piqa": [1] * 8}, "h2o@10%": {"piqa": [0] * 7 + [1]}, "h2o@100%": {"piqa": [1] * 7 + [0]}}
    found = told_of(tmp_path / "run", given)
    assert cell(found, "h2o@10%")["tasks"]["piqa"]["p_holm"] == pytest.approx(2 * 2 / 2**7)
    whole = cell(found, "h2o@100%")["tasks"]["piqa"]
    assert (whole["p_holm"], whole["verdict"]) == (1.0, "inconclusive")


def test_the_mean_is_over_tasks_and_not_over_documents(tmp_path) -> None:
    given = {"full@100%": {"piqa": [1] * 8, "copa": [1] * 4}, "h2o@50%": {"piqa": [0] * 4 + [1] * 4, "copa": [1] * 4}}
    mean = cell(told_of(tmp_path / "run", given), "h2o@50%")["mean"]
    assert mean["accuracy"] == (1 / 2 + 1) / 2
    assert mean["difference"] == (-1 / 2 + 0) / 2
    assert mean["stderr"] == pytest.approx(math.sqrt(8 / 4 / 7 / 8) / 2)


def test_costs_are_shares_of_the_full_caches(by_hand) -> None:
    tenth = cell(by_hand, "h2o@10%")
    assert (tenth["held"], tenth["held_bytes"], tenth["read"], tenth["acted"]) == (0.5, 0.5, 0.25, 1.0)
    assert tenth["bytes_per_document"] == 40.0
    assert (tenth["share"], cell(by_hand, "full@100%")["share"]) == (0.1, 1.0)


def test_the_pareto_front_is_of_mean_accuracy_against_cost(by_hand) -> None:
    labels = {cell["key"]: cell["label"] for cell in by_hand["groups"][0]["cells"]}
    pareto = by_hand["groups"][0]["pareto"]
    assert [labels[key] for key in pareto["bytes"]] == ["full@100%", "h2o@50%", "h2o@100%"]
    assert pareto["seconds"] == []


def test_seconds_of_cells_give_a_front_and_stand_aside_in_json(tmp_path) -> None:
    write_by_hand(tmp_path, BY_HAND)
    run = Run.load(tmp_path)
    answers = {at: replace(one, costs={**one.costs, "seconds": 2.0}) for at, one in run.answers.items()}
    found = report(replace(run, answers=answers))
    keys = [cell["key"] for cell in found.groups[0]["cells"]]
    assert [cell["seconds"] for cell in found.groups[0]["cells"]] == [4.0] * 4
    assert found.groups[0]["pareto"]["seconds"] == [keys[0], keys[3]]
    value = json.loads(told(found).text("json"))
    assert value["aside"]["cells"] == dict.fromkeys(keys, 4.0)
    assert value["aside"]["pareto"] == [[keys[0], keys[3]]]
    assert "seconds" not in json.dumps(value["groups"])


def test_documents_of_one_passage_count_less(tmp_path) -> None:
    given = {"full@100%": {"boolq": [1] * 8}, "h2o@50%": {"boolq": [0, 0, 0, 0, 1, 1, 1, 1]}}
    alone = cell(told_of(tmp_path / "alone", given), "h2o@50%")["tasks"]["boolq"]
    passages = {"boolq": ["a", "a", "b", "b", "c", "c", "d", "d"]}
    together = cell(told_of(tmp_path / "together", given, clusters=passages), "h2o@50%")["tasks"]["boolq"]
    assert together["difference"] == alone["difference"]
    assert together["difference_low"] < alone["difference_low"]
    assert together["p"] >= alone["p"]


# Knees, and what is never called ok


def flips(budgets: dict[str, int]) -> dict:
    """A run of many documents on which each budget loses so many answers."""
    cells = {f"h2o@{budget}": {"piqa": [0] * lost + [1] * (MANY - lost)} for budget, lost in budgets.items()}
    return {"full@100%": {"piqa": [1] * MANY}, **cells}


def test_the_knee_is_the_smallest_budget_that_is_ok(tmp_path) -> None:
    found = told_of(tmp_path / "run", flips({"50%": 0, "2%": 100, "10%": 0, "100%": 0}))
    assert knee(found, "h2o", "piqa") == {"policy": "h2o", "task": "piqa", "budget": "10%", "monotone": True, "note": ""}
    assert knee(found, "h2o", "mean")["budget"] == "10%"


def test_a_knee_says_when_a_larger_budget_is_not_ok(tmp_path) -> None:
    found = knee(told_of(tmp_path / "run", flips({"10%": 0, "50%": 100})), "h2o", "piqa")
    assert (found["budget"], found["monotone"], found["note"]) == ("10%", False, "a larger one is not")


def test_everything_is_no_knee(tmp_path) -> None:
    found = knee(told_of(tmp_path / "run", flips({"10%": 100, "100%": 0})), "h2o", "piqa")
    assert (found["budget"], found["note"]) == (None, "none of those measured")


def test_a_cell_that_acted_on_few_prompts_is_greyed_never_ok_and_no_knee(tmp_path) -> None:
    found = told_of(tmp_path / "run", flips({"10%": 0, "50%": 0}), acted={("h2o@10%", "piqa"): 0.49})
    tenth = cell(found, "h2o@10%")
    assert (tenth["greyed"], tenth["tasks"]["piqa"]["verdict"], tenth["mean"]["verdict"]) == (True, *["inconclusive"] * 2)
    assert not cell(found, "h2o@50%")["greyed"]
    assert knee(found, "h2o", "piqa")["budget"] == "50%"
    assert knee(found, "h2o", "mean")["note"] == "not counted: 10%"
    assert "100.0 (+0.0) ? †" in told_text(tmp_path / "run", "md")


def test_what_acts_on_few_prompts_may_still_be_worse(tmp_path) -> None:
    found = told_of(tmp_path / "run", flips({"10%": 100}), acted={("h2o@10%", "piqa"): 0.4})
    assert cell(found, "h2o@10%")["tasks"]["piqa"]["verdict"] == "worse"


def test_a_task_on_which_the_policy_acted_is_not_greyed_with_another(tmp_path) -> None:
    given = {label: {**right, "copa": [1] * MANY} for label, right in flips({"10%": 0}).items()}
    found = cell(told_of(tmp_path / "run", given, acted={("h2o@10%", "copa"): 0.1}), "h2o@10%")
    assert [found["tasks"][task]["verdict"] for task in ("piqa", "copa")] == ["ok", "inconclusive"]
    assert (found["greyed"], found["mean"]["verdict"]) == (True, "inconclusive")


def test_a_cell_at_its_floor_is_never_ok_and_no_knee(tmp_path) -> None:
    write_by_hand(tmp_path, flips({"10%": 0, "50%": 0}))
    run = Run.load(tmp_path)
    cells = [{**one, "floors": ["piqa", "copa"] if one["budget"] == "10%" else []} for one in run.store.manifest["cells"]]
    found = report(replace(run, store=replace(run.store, manifest={**run.store.manifest, "cells": cells})))
    assert cell(found.as_dict(), "h2o@10%")["tasks"]["piqa"]["verdict"] == "inconclusive"
    assert knee(found.as_dict(), "h2o", "piqa")["budget"] == "50%"
    assert "100.0 (+0.0) ? ‡" in told(found).text("md")


def test_numbers_of_tokens_stand_behind_shares_and_have_none(tmp_path) -> None:
    found = told_of(tmp_path / "run", flips({"256": 0, "64": 0, "10%": 0}))
    assert cell(found, "h2o@64")["share"] is None
    assert "| policy | 10 % | 100 % | 64 tokens | 256 tokens |" in told_text(tmp_path / "run", "md")


# What else is said


def test_the_full_cache_measured_twice_gives_the_noise_floor(tmp_path) -> None:
    given = {"full@100%": {"piqa": [1] * 8}, "full@100.0%": {"piqa": [1] * 6 + [0] * 2}, "h2o@50%": {"piqa": [1] * 8}}
    found = told_of(tmp_path / "run", given)
    assert found["groups"][0]["noise"] == {"flips": 2, "n": 8, "furthest": 1.0}
    assert [cell["label"] for cell in found["groups"][0]["cells"]] == ["full@100%", "h2o@50%"]
    assert "picks another answer on 2 of 8 documents; log-likelihoods move by at most 1 nats" in told_text(tmp_path / "run", "md")


def test_a_run_without_a_second_full_cell_has_no_noise_floor(by_hand) -> None:
    assert by_hand["groups"][0]["noise"] is None


def test_published_accuracies_stand_beside_ours_with_their_source(tmp_path) -> None:
    rows = [
        {"model": None, "policy": "h2o", "budget": "50%", "task": "piqa", "accuracy": 71.5},
        {"model": "other", "policy": "full", "budget": "100%", "task": "copa", "accuracy": 80.0},
    ]
    shown = {"title": "By hand.", "margin": 1.0, "reference": {"source": "A study", "rows": rows}}
    found = told_of(tmp_path / "run", BY_HAND, shown=shown)
    assert cell(found, "h2o@50%")["tasks"]["piqa"]["reference"] == 0.715
    assert cell(found, "full@100%")["tasks"]["copa"]["reference"] is None
    text = told_text(tmp_path / "run", "md")
    assert "|  | h2o | 50 % | piqa | 71.5 | 62.5 |" in text
    assert "| other | full | 100 % | copa | 80.0 | 100.0 |" in text
    assert "Source: A study" in text


def test_every_model_and_protocol_has_a_group_of_its_own(tmp_path) -> None:
    write_run(tmp_path, protocols=("prompt", "stream"), documents=32)
    groups = report(Run.load(tmp_path)).as_dict()["groups"]
    assert [(group["model"], group["protocol"], len(group["cells"])) for group in groups] == [
        ("smol", "prompt", 9),
        ("smol", "stream", 9),
    ]


def test_it_says_which_part_of_a_task_was_asked_and_what_guessing_gives(tmp_path) -> None:
    write_by_hand(tmp_path, BY_HAND)
    assert "A seeded random 8 of 80 documents. Chance: 50.0 %." in told_text(tmp_path, "md")


def test_a_task_that_is_not_whole_is_left_out_and_named(tmp_path, command) -> None:
    write_by_hand(tmp_path, BY_HAND, skip=1)
    found = report(Run.load(tmp_path))
    assert found.incomplete == ["smol/prompt/copa/0001"]
    assert [task["name"] for task in found.groups[0]["tasks"]] == ["piqa"]
    code, out, err = command("report", tmp_path, "--format", "md")
    assert code == 0
    assert "- Not finished: smol/prompt/copa lacks 1 pack and is left out." in out
    assert err == f"evalkit: {tmp_path} is not finished (packs missing: 1): only tasks that are whole are shown\n"


# Errors


def test_a_folder_without_a_run_is_a_line(tmp_path, command) -> None:
    code, out, err = command("report", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "holds no run" in err


def test_a_damaged_pack_is_a_line(tmp_path, command) -> None:
    store = write_by_hand(tmp_path, BY_HAND)
    path = store.names()[0].path(tmp_path)
    path.write_text(path.read_text()[:-40])
    code, out, err = command("report", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is cut short or was changed" in err


def test_a_run_of_another_schema_is_a_line(tmp_path, command) -> None:
    write_by_hand(tmp_path, BY_HAND)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    code, out, err = command("report", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is of schema 99" in err


def test_a_run_without_the_full_cache_is_refused(tmp_path) -> None:
    write_by_hand(tmp_path, {"h2o@10%": {"piqa": [1] * 8}})
    with pytest.raises(UsageError, match="has no full cell for smol under protocol prompt"):
        report(Run.load(tmp_path))


def test_a_run_without_a_whole_task_is_refused(tmp_path) -> None:
    write_by_hand(tmp_path, BY_HAND, skip=3)
    with pytest.raises(UsageError, match=r"no task whose packs are all there \(missing: 3\)"):
        report(Run.load(tmp_path))


def test_a_task_without_accuracy_is_refused(tmp_path) -> None:
    write_by_hand(tmp_path, BY_HAND)
    run = Run.load(tmp_path)
    answers = {at: replace(one, metrics={"f1": one.metrics["acc"]}) for at, one in run.answers.items()}
    with pytest.raises(UsageError, match=r"a task has no acc \(it has f1\)"):
        report(replace(run, answers=answers))
