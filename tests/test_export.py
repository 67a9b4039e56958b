"""lm-eval's files of a sweep's cells say what lm-eval says of each cell alone."""

import json
import logging
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from evalkit import data as local
from evalkit import harness
from evalkit.rooms import room
from evalkit.runs import Cell, Run
from evalkit.sweep import Sweep
from tests.saved import save
from tests.stub import mini_alone, planned

TASKS = ["mini_winogrande", "mini_piqa"]
SAME = ("results", "n-samples", "configs", "versions", "n-shot", "higher_is_better", "task_hashes", "group_subtasks")
CLOSE = 1e-9


@pytest.fixture(scope="module", autouse=True)
def _few_tasks():
    with mini_alone():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return save(tmp_path_factory.mktemp("model"), num_hidden_layers=4)  # InfiniGen leaves the first two alone


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory) -> Run:
    """A sweep of a tiny model in float64."""
    plan = planned(
        models=[{"name": str(folder), "args": {"dtype": "float64", "device": "cpu"}}],
        policies=[{"name": "h2o", "budgets": [0.1, 0.5]}, "infinigen", "tova", {"name": "kivi", "budgets": [0.5]}],
        budgets=[0.2], tasks=TASKS, limit=3, shard=2, seeds={"subset": 3},
    )  # fmt: skip
    streamed = planned(**{**plan.model_dump(mode="json"), "protocols": ["prompt", "stream"]})
    return Run.load(Sweep(streamed, tmp_path_factory.mktemp("run")).run().folder)


def cells() -> list[tuple[str, str]]:
    labels = ["full@100%", "h2o@10%", "h2o@50%", "infinigen@20%", "tova@20%", "kivi@50%"]
    return [(protocol, label) for protocol in ("prompt", "stream") for label in labels]


def of(run: Run, protocol: str, label: str) -> tuple[Cell, dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """A cell, its results file and its samples files by task."""
    (cell,) = (cell for cell in run.cells if (cell.protocol, cell.label) == (protocol, label))
    (where,) = run.store.folder.glob(f"cells/*/{protocol}/{label}")
    (results,) = where.glob("results_*.json")
    return cell, json.loads(results.read_text("utf-8")), samples_in(where)


def samples_in(where: Path) -> dict[str, list[dict[str, Any]]]:
    files = {path.name.removeprefix("samples_").rsplit("_", 1)[0]: path for path in where.glob("samples_*.jsonl")}
    return {task: [json.loads(line) for line in path.read_text("utf-8").split("\n") if line] for task, path in files.items()}


def chosen(run: Run) -> dict[str, list[int]]:
    return {task.name: [document["doc_id"] for document in run.documents(task.name)] for task in run.tasks}


def plain(value: Any) -> Any:
    """What is left of a value in a file of lm-eval's."""
    return json.loads(json.dumps(value, default=lm_eval.utils.handle_non_serializable, ensure_ascii=False))


def configs(found: Mapping[str, Any]) -> dict[str, Any]:
    """The tasks' configurations, without the model's arguments, which lm-eval adds to their metadata."""
    return {
        task: {**config, "metadata": {"version": (config.get("metadata") or {}).get("version")}}
        for task, config in plain(found["configs"]).items()
    }


@pytest.fixture(scope="module")
def alone(folder, run):
    """What lm-eval says of a cell alone, on the same documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # seconds of asking the machine
        yield partial(evaluated, tasks=TASKS, samples=chosen(run), include=room("tasks"))


def evaluated(model_args: Mapping[str, Any], tasks: list[str], samples: Mapping[str, list[int]], include: Path, **more: Any) -> Any:
    """Let lm-eval evaluate what a results file says it holds."""
    given = dict(model_args)
    lm = getattr(harness, f"kv_{given.pop('policy')}")(**given)
    return lm_eval.simple_evaluate(lm, tasks=tasks, samples=samples, task_manager=indexed(include), **more)


@cache
def indexed(include: Path) -> TaskManager:
    return TaskManager(include_path=str(include), include_defaults=False)


@pytest.mark.parametrize(("protocol", "label"), cells())
def test_a_cells_files_are_those_of_the_cell_alone(run, alone, protocol, label):
    _, results, samples = of(run, protocol, label)
    wanted = alone(results["config"]["model_args"])
    for part in set(SAME) - {"configs", "task_hashes"}:
        assert results.get(part) == plain(wanted.get(part)), part
    assert configs(results) == configs(wanted)
    assert set(samples) == set(wanted["samples"]) == set(TASKS)
    for task, lines in samples.items():
        for ours, theirs in zip(lines, wanted["samples"][task], strict=True):
            compare(ours, theirs)


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """One document's line: all the same but for rounding in the last places of log-likelihoods."""
    assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=CLOSE)
    assert flags(ours) == flags(theirs)
    for part in theirs.keys() - {"resps", "filtered_resps", "arguments", "target"}:
        assert ours[part] == plain(theirs[part]), part


def logprobs(sample: Mapping[str, Any]) -> list[float]:
    return [float(logprob) for ((logprob, _),) in sample["resps"]]


def flags(sample: Mapping[str, Any]) -> list[str]:
    return [str(greedy) for ((_, greedy),) in sample["resps"]]


def test_policies_differ_so_that_the_comparison_means_something(run):
    answers = [str([logprobs(line) for line in of(run, *at)[2]["mini_piqa"]]) for at in cells()]
    assert len(set(answers)) == len(answers) - 1  # full is full under both protocols


def test_the_files_are_those_that_lm_eval_writes(run, alone, tmp_path):
    """Key for key and line for line, as `lm_eval --log_samples --output_path` does."""
    _, results, samples = of(run, "prompt", "h2o@10%")
    tracker = EvaluationTracker(output_path=str(tmp_path))
    found = alone(results["config"]["model_args"], evaluation_tracker=tracker)
    logged = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=logged)
    for task in TASKS:
        tracker.save_results_samples(task_name=task, samples=logged[task])
    (written,) = tmp_path.rglob("results_*.json")
    theirs = json.loads(written.read_text("utf-8"))
    for part in set(SAME) - {"configs"}:
        assert results.get(part) == theirs.get(part), part
    assert configs(results) == configs(theirs)
    wanted = samples_in(written.parent)
    assert set(samples) == set(wanted)
    for task, lines in wanted.items():
        for mine, line in zip(samples[task], lines, strict=True):
            assert list(mine) == list(line)
            assert logprobs(mine) == pytest.approx(logprobs(line), abs=CLOSE)
            assert flags(mine) == flags(line)
            assert {**mine, **dict.fromkeys(("resps", "filtered_resps"))} == {**line, **dict.fromkeys(("resps", "filtered_resps"))}


def test_accuracy_in_the_file_is_that_of_the_report(run):
    for at in cells():
        cell, results, _ = of(run, *at)
        for task in TASKS:
            assert results["results"][task]["acc,none"] == run.answers[cell.key, task].metrics["acc"].mean()


def test_the_file_says_what_it_cost_and_where_it_is_from(run):
    cell, results, _ = of(run, "stream", "h2o@10%")
    told = results["config"]["evalkit"]
    assert (told["run"], told["key"], told["knobs"], told["protocol"]) == (run.store.digest, cell.key, cell.knobs, "stream")
    assert told["tasks"]["mini_piqa"]["held"] <= 0.1
    told = results["config"]["model_args"]
    assert {"dtype": "float64", "policy": "h2o", "budget": "10%", "protocol": "stream", "row_tokens": 1024}.items() <= told.items()


# On real data with the default model, where both are at hand


def test_a_sweep_on_real_tasks_equals_each_cell_alone_but_for_ties(data, tmp_path, record_property):
    from evalkit.fetch import model_folder

    smol = str(model_folder("smollm2-135m-instruct"))
    tasks = ["piqa", "openbookqa"]
    plan = planned(
        models=[{"name": smol, "args": {"dtype": "float32", "device": "cpu"}}], policies=["h2o", "infinigen"], budgets=[0.2],
        tasks=tasks, limit=12, shard=5,
    )  # fmt: skip
    real = Run.load(Sweep(plan, tmp_path / "run", data=data).run().folder)
    gaps, flipped = dict[tuple[str, str, int], float](), 0
    with local.prepared(data) as include, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        for cell in real.cells:
            _, results, samples = of(real, "prompt", cell.label)
            wanted = evaluated(results["config"]["model_args"], tasks, chosen(real), include)
            for task in tasks:
                for ours, theirs in zip(samples[task], wanted["samples"][task], strict=True):
                    gaps[cell.label, task, ours["doc_id"]] = max(
                        abs(a - b) for a, b in zip(logprobs(ours), logprobs(theirs), strict=True)
                    )
                    flipped += ours["acc"] != theirs["acc"]
    ties = {at: gap for at, gap in gaps.items() if gap > 1e-3}  # another entry kept, by the last place of a score
    record_property("documents with a tie", len(ties))
    furthest = max(gaps[at] for at in gaps.keys() - ties)
    print(f"ties: {len(ties)} of {len(gaps)} documents; the others at most {furthest:.1e} nats apart")
    assert len(gaps) == 3 * 2 * 12
    assert max(len(ties), flipped) <= 3, "so many are no ties"
    assert not any(label.startswith("full") for label, _, _ in ties)
