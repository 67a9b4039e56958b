"""The mini suite: enough items, fair items, and prompts that are those of the benchmarks it imitates."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager
from official import EVALUATED, YAMLS, loaded, official_task, requests, right_choices

from evalkit.data import COLUMNS, read_rows
from evalkit.rooms import room

Row = dict[str, Any]

MINI = room("tasks") / "mini"
ROWS = {task: read_rows(MINI / f"{task}.jsonl", COLUMNS[task]) for task in YAMLS}

# The columns that lm-eval reads, with their types on the hub.
TYPES: dict[str, dict[str, type]] = {
    "piqa": {"goal": str, "sol1": str, "sol2": str, "label": int},
    "hellaswag": {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": str},
    "copa": {"premise": str, "question": str, "choice1": str, "choice2": str, "label": int},
    "winogrande": {"sentence": str, "option1": str, "option2": str, "answer": str},
    "openbookqa": {"question_stem": str, "choices": dict, "answerKey": str},
    "boolq": {"passage": str, "question": str, "label": int},
}
QUESTIONS = {
    "piqa": ("goal",),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b"),
    "copa": ("premise", "question"),
    "winogrande": ("sentence",),
    "openbookqa": ("question_stem",),
    "boolq": ("passage", "question"),
}


def question(task: str, row: Row) -> str:
    return " ".join(row[column] for column in QUESTIONS[task]).strip().lower()


def choices(task: str, row: Row) -> list[str]:
    choices_of: dict[str, Callable[[Row], list[str]]] = {
        "piqa": lambda row: [row["sol1"], row["sol2"]],
        "hellaswag": lambda row: row["endings"],
        "copa": lambda row: [row["choice1"], row["choice2"]],
        "winogrande": lambda row: [row["option1"], row["option2"]],
        "openbookqa": lambda row: row["choices"]["text"],
        "boolq": lambda row: ["no", "yes"],
    }
    return choices_of[task](row)


def right(task: str, row: Row) -> int:
    if task == "winogrande":
        return int(row["answer"]) - 1
    if task == "openbookqa":
        return int(row["choices"]["label"].index(row["answerKey"]))
    return int(row["label"])


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("task", YAMLS)
def test_every_task_has_at_least_sixty_items_with_the_columns_of_its_benchmark(task: str) -> None:
    assert len(ROWS[task]) >= 60
    for row in ROWS[task]:
        assert {column: type(row[column]) for column in TYPES[task]} == TYPES[task]
        assert 0 <= right(task, row) < len(choices(task, row))


def test_the_readme_states_the_counts() -> None:
    stated = re.findall(r"^\| `mini_(\w+)` \| (\d+) \|", (MINI.parent / "README.md").read_text("utf-8"), re.MULTILINE)
    assert stated == [(task, str(len(rows))) for task, rows in ROWS.items()]


@pytest.mark.parametrize("task", YAMLS)
def test_no_item_occurs_twice_and_no_choice_within_an_item(task: str) -> None:
    asked = Counter((question(task, row), *sorted(choices(task, row))) for row in ROWS[task])
    assert max(asked.values()) == 1
    for row in ROWS[task]:
        assert len({choice.strip().lower() for choice in choices(task, row)}) == len(choices(task, row))


@pytest.mark.parametrize("task", YAMLS)
def test_the_right_answer_stands_in_every_place_equally_often(task: str) -> None:
    count = len(choices(task, ROWS[task][0]))
    places = Counter(right(task, row) for row in ROWS[task])
    even = len(ROWS[task]) / count
    assert all(abs(places[place] - even) <= 0.1 * even for place in range(count))


@pytest.mark.parametrize("extreme", [max, min])
@pytest.mark.parametrize("task", YAMLS)
def test_the_length_of_an_answer_gives_nothing_away(task: str, extreme: Callable[[list[int]], int]) -> None:
    """Who always takes the longest choice, or the shortest, hardly beats chance."""
    hits = 0.0
    for row in ROWS[task]:
        lengths = [len(choice) for choice in choices(task, row)]
        taken = [place for place, length in enumerate(lengths) if length == extreme(lengths)]
        hits += (right(task, row) in taken) / len(taken)
    assert hits / len(ROWS[task]) <= 1 / len(lengths) + 0.1


def test_a_passage_has_between_one_and_two_hundred_words() -> None:
    lengths = [words(row["passage"]) for row in ROWS["boolq"]]
    assert min(lengths) >= 100
    assert max(lengths) <= 200


def test_a_question_about_a_passage_leaves_its_mark_to_the_template() -> None:
    assert not [row["question"] for row in ROWS["boolq"] if row["question"].endswith("?")]


def test_a_sentence_has_one_gap_and_its_names_occur_in_it() -> None:
    for row in ROWS["winogrande"]:
        assert row["sentence"].count("_") == 1
        assert row["option1"] in row["sentence"]
        assert row["option2"] in row["sentence"]


def test_causes_and_effects_are_asked_for_equally_often() -> None:
    asked = Counter(row["question"] for row in ROWS["copa"])
    assert asked.keys() == {"cause", "effect"}
    assert abs(asked["cause"] - asked["effect"]) <= 0.1 * len(ROWS["copa"])
    assert all(row["premise"].endswith(".") for row in ROWS["copa"])


@pytest.mark.parametrize("task", YAMLS)
def test_the_prompts_are_those_of_the_benchmark(task: str) -> None:
    ours, theirs = loaded(f"mini_{task}", MINI), official_task(task, ROWS[task])
    assert requests(ours) == requests(theirs)
    wanted = [[right(task, row)] for row in ROWS[task]]
    assert [right_choices(ours, doc) for doc in ours.eval_docs] == wanted
    assert [right_choices(theirs, doc) for doc in theirs.eval_docs] == wanted


@pytest.mark.parametrize("task", YAMLS)
def test_the_metrics_are_those_of_the_benchmark(task: str) -> None:
    ours, theirs = loaded(f"mini_{task}", MINI), official_task(task, ROWS[task][:1])
    assert ours.higher_is_better() == theirs.higher_is_better()
    assert ours.aggregation() == theirs.aggregation()


def test_the_group_is_the_mean_over_the_six_tasks_whatever_their_sizes() -> None:
    found = TaskManager(include_path=str(MINI), include_defaults=False).load("mini")
    assert sorted(found["tasks"]) == sorted(f"mini_{task}" for task in YAMLS)
    assert [(each.metric, each.weight_by_size) for each in found["groups"]["mini"].aggregate_metric_list] == [("acc", False)]


@pytest.mark.parametrize("task", YAMLS)
def test_no_item_is_in_the_data_set(task: str, data: Path) -> None:
    lines = (data / task / f"{EVALUATED[task]}.jsonl").read_text("utf-8").split("\n")
    theirs = {question(task, json.loads(line)) for line in lines if line}
    assert not theirs & {question(task, row) for row in ROWS[task]}
