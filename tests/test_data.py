"""Rows on disk: the official requests from them, nothing else changed, and one line for what cannot be used."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from jinja2 import UndefinedError
from lm_eval.tasks import TaskManager
from official import EVALUATED, YAMLS, Rows, loaded, official_task, requests, right_choices

from evalkit.data import COLUMNS, mini_rows, official_tasks, passed_over, prepared, task_names, use
from evalkit.errors import UsageError

DATA_SOURCE_KEYS = {"dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset"} | {
    f"{role}_split" for role in ("training", "validation", "test", "fewshot")
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def put(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def copa(number: int, **other: Any) -> dict[str, Any]:
    choices = {"choice1": "It rained.", "choice2": "It was dry."}
    return {"premise": f"The road number {number} was wet.", "question": "cause", **choices, "label": 0, **other}


def openbookqa(number: int) -> dict[str, Any]:
    choices = {"text": [str(number + 1), str(number + 2)], "label": ["A", "B"]}
    return {"question_stem": f"After {number} comes", "choices": choices, "answerKey": "A"}


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the mini suite, laid out as the six data sets."""
    data = tmp_path_factory.mktemp("data")
    for task, split in EVALUATED.items():
        put(data / task / f"{split}.jsonl", list(mini_rows(mini=task)["validation"]))
    return data


@pytest.mark.parametrize("task", YAMLS)
def test_rows_on_disk_give_the_official_requests(task: str, small_data: Path, tmp_path: Path) -> None:
    use(small_data, tmp_path)
    rows = read(small_data / task / f"{EVALUATED[task]}.jsonl")
    assert requests(loaded(task, tmp_path)) == requests(official_task(task, rows))


@pytest.mark.parametrize("task", YAMLS)
def test_real_rows_give_the_official_requests(task: str, data: Path, tmp_path: Path) -> None:
    """On the first 400 documents of each task; all of them agree too, but take minutes."""
    use(data, tmp_path)
    rows = read(data / task / f"{EVALUATED[task]}.jsonl")
    assert requests(loaded(task, tmp_path), limit=400) == requests(official_task(task, rows[:400]))


@pytest.mark.parametrize("task", YAMLS)
def test_nothing_but_the_source_of_rows_differs_from_the_official_task(task: str, small_data: Path, tmp_path: Path) -> None:
    use(small_data, tmp_path)
    ours = loaded(task, tmp_path).config.to_dict()
    theirs = official_task(task, read(small_data / task / f"{EVALUATED[task]}.jsonl")).config.to_dict()
    for config in (ours, theirs):
        # The few-shot settings repeat the split they inherit, and lm-eval notes which YAML it has read.
        config["fewshot_config"].pop("split")
        config["metadata"].pop("config_source")
    assert {key for key in ours | theirs if ours.get(key) != theirs.get(key)} <= DATA_SOURCE_KEYS


def test_the_folder_overrides_the_six_tasks_in_lm_eval_and_leaves_all_others(small_data: Path, tmp_path: Path) -> None:
    use(small_data, tmp_path)
    manager = TaskManager(include_path=str(tmp_path))
    yamls = {name: manager.task_index[name].yaml_path for name in manager.all_subtasks}
    assert yamls == official_tasks() | {task: tmp_path / f"{task}.yaml" for task in YAMLS}
    assert {"boolq", "cb", "copa", "wic"} <= manager.task_index["super-glue-lm-eval-v1"].tags


def test_any_official_task_can_be_given_rows(tmp_path: Path) -> None:
    row = {"question": "What is wet?", "choices": {"text": ["rain", "sand"], "label": ["A", "B"]}, "answerKey": "A"}
    put(tmp_path / "data/arc_easy/test.jsonl", [row])
    use(tmp_path / "data", tmp_path / "out")
    assert [each[3:] for each in requests(loaded("arc_easy", tmp_path / "out"))] == [
        ("Question: What is wet?\nAnswer:", " rain"),
        ("Question: What is wet?\nAnswer:", " sand"),
    ]


def test_a_task_that_computes_its_rows_can_be_given_others(tmp_path: Path) -> None:
    row = {"input": "Mary went home.", "question": "Where is Mary?", "target": "home"}
    put(tmp_path / "data/babilong_qa3/qa3.jsonl", [row])
    use(tmp_path / "data", tmp_path / "out")
    assert list(loaded("babilong_qa3", tmp_path / "out").eval_docs) == [row]


def test_examples_come_from_the_training_file(tmp_path: Path) -> None:
    put(tmp_path / "data/copa/validation.jsonl", [copa(1)])
    put(tmp_path / "data/copa/train.jsonl", [copa(2), copa(2)])
    use(tmp_path / "data", tmp_path / "out")
    context = requests(loaded("copa", tmp_path / "out"), shots=1)[0][3]
    assert context == "The road number 2 was wet because  it rained.\n\nThe road number 1 was wet because"


def test_a_document_is_never_its_own_example(tmp_path: Path) -> None:
    put(tmp_path / "data/openbookqa/test.jsonl", [openbookqa(number) for number in range(10, 16)])
    use(tmp_path / "data", tmp_path / "out")
    for _, number, _, context, _ in requests(loaded("openbookqa", tmp_path / "out"), shots=5):
        assert context.count(f"After {number + 10} comes") == 1


@pytest.mark.parametrize("task", YAMLS)
def test_the_columns_asked_for_are_those_the_official_task_reads(task: str) -> None:
    rows = list(mini_rows(mini=task)["validation"])[:3]
    needed = [{column: row[column] for column in COLUMNS[task]} for row in rows]
    assert outcome(task, needed) == outcome(task, rows)
    for column in COLUMNS[task]:
        lacking = [{key: value for key, value in row.items() if key != column} for row in needed]
        assert outcome(task, lacking) != outcome(task, rows)


def outcome(name: str, rows: Rows) -> Any:
    """Return all that is asked and which choices are right, or why that cannot be told."""
    try:
        task = official_task(name, rows)
        return requests(task), [right_choices(task, doc) for doc in task.eval_docs]
    except (KeyError, ValueError, UndefinedError) as error:
        return repr(error)


def test_changed_rows_are_seen_even_when_the_time_of_the_file_is_kept(tmp_path: Path) -> None:
    file, out = tmp_path / "data/copa/validation.jsonl", tmp_path / "out"

    def premise_after(rows: Rows, keep_time: bool, write: bool) -> str:
        before = file.stat().st_mtime_ns if file.exists() else 0
        put(file, rows)
        os.utime(file, ns=(before, before if keep_time else before + 10**9))
        if write:
            use(tmp_path / "data", out)
        return str(loaded("copa", out).eval_docs[0]["premise"])

    assert "number 1" in premise_after([copa(1)], keep_time=False, write=True)
    assert "number 2" in premise_after([copa(2)], keep_time=True, write=True)
    assert "number 3" in premise_after([copa(3)], keep_time=False, write=False)


def test_the_time_of_the_file_is_all_that_the_cache_of_datasets_looks_at(tmp_path: Path) -> None:
    """The reason for the digest in the YAML; when this fails, the digest can go."""
    file = tmp_path / "rows.jsonl"
    found = []
    for number in (1, 2):
        put(file, [copa(number)])
        os.utime(file, ns=(0, 0))
        rows = datasets.load_dataset("json", data_files={"validation": str(file)})
        found.append(rows["validation"][0]["premise"])
    assert found[0] == found[1]


def test_files_that_no_task_reads_are_passed_over_and_named(tmp_path: Path) -> None:
    put(tmp_path / "copa/validation.jsonl", [copa(1)])
    put(tmp_path / "copa/validation_exact.jsonl", [{"no": "task"}])
    put(tmp_path / "copa/test.jsonl", [{"the official task": "has no such split"}])
    put(tmp_path / "conversations/long.jsonl", [{"no": "task"}])
    assert task_names(tmp_path) == ["copa"]
    assert passed_over(tmp_path) == [
        tmp_path / name for name in ("conversations/long.jsonl", "copa/test.jsonl", "copa/validation_exact.jsonl")
    ]


def test_writing_again_gives_the_same_bytes_and_nothing_else(small_data: Path, tmp_path: Path) -> None:
    first = {path: path.read_bytes() for path in use(small_data, tmp_path / "out")}
    assert {path: path.read_bytes() for path in use(small_data, tmp_path / "out")} == first
    assert [path.name for path in first] == sorted(f"{task}.yaml" for task in YAMLS)
    assert sorted((tmp_path / "out").iterdir()) == list(first)


def test_a_folder_for_one_command_goes_when_the_command_ends(small_data: Path) -> None:
    with prepared(small_data) as folder:
        assert sorted(path.stem for path in folder.iterdir()) == sorted(YAMLS)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["d[1]", "d*", "with blank", "ünï", ".hidden"])
def test_any_folder_name_will_do(name: str, tmp_path: Path) -> None:
    put(tmp_path / name / "copa/validation.jsonl", [copa(1)])
    with prepared(tmp_path / name) as folder:
        assert len(loaded("copa", folder).eval_docs) == 1


def test_a_file_of_someone_else_is_not_overwritten(tmp_path: Path) -> None:
    put(tmp_path / "data/copa/validation.jsonl", [copa(1)])
    put(tmp_path / "data/boolq/validation.jsonl", [{"passage": "p", "question": "q", "label": 1}])
    theirs = tmp_path / "out/copa.yaml"
    theirs.parent.mkdir()
    theirs.write_text("task: copa\n")
    with pytest.raises(UsageError, match=r"copa\.yaml was not written by evalkit"):
        use(tmp_path / "data", tmp_path / "out")
    assert theirs.read_text() == "task: copa\n"
    assert list(theirs.parent.iterdir()) == [theirs]


BAD_ROWS = {
    "not JSON": ('{"premise": "a"\n', "copa/validation.jsonl, line 3 is not valid JSON"),
    "no object": ("[1, 2]\n", "line 3 is not a JSON object"),
    "no label": (json.dumps(copa(1, label=None)) + "\n", "line 3 has no label; the task reads premise"),
    "no column": ('{"label": 1}\n', "line 3 has no premise, question, choice1, choice2;"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_refused_by_file_and_line(case: str, tmp_path: Path) -> None:
    line, message = BAD_ROWS[case]
    file = tmp_path / "data/copa/validation.jsonl"
    put(file, [copa(1)])
    file.write_text(file.read_text() + "\n" + line)
    with pytest.raises(UsageError, match=message) as error:
        use(tmp_path / "data", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


BAD_FILES = {
    "empty": ({"copa/validation.jsonl": b"\n\n"}, "validation.jsonl holds no rows"),
    "not text": ({"copa/validation.jsonl": b"\xff\xfe{"}, "validation.jsonl: it is not UTF-8"),
    "other split": ({"copa/train.jsonl": b"{}"}, r"copa/validation\.jsonl is missing; lm-eval evaluates copa on"),
    "needs its test": ({"openbookqa/validation.jsonl": b"{}"}, r"openbookqa/test\.jsonl is missing"),
    "misspelt": ({"hellaswg/validation.jsonl": b"{}"}, r"no task 'hellaswg' \(did you mean 'hellaswag'\?\)"),
    "Python task": ({"squadv2/validation.jsonl": b"{}"}, "squadv2 is written in Python"),
    "only other files": ({"text/notes.jsonl": b"{}"}, "holds no task; expected <task>/<split>.jsonl"),
    "one level too deep": ({"validation.jsonl": b"{}"}, "holds no task; expected <task>/<split>.jsonl"),
    "nothing": ({}, "data is not a folder"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_what_cannot_be_used_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    files, message = BAD_FILES[case]
    for name, content in files.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        use(tmp_path / "data", tmp_path / "out")
    assert "\n" not in str(error.value)


def test_a_place_that_cannot_be_written_to_is_named(small_data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write to .*out"):
        use(small_data, tmp_path / "out")
