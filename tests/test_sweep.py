"""Sweeps: resumable, the same bytes whatever happened on the way, nothing scored twice, and everything that counts is in a key."""

import gc
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evalkit import cli, manifest, spread, sweep
from evalkit.errors import UsageError
from evalkit.harness.tasks import drawn
from evalkit.runs import Run
from evalkit.store import OtherRun, Store, anew, locked
from evalkit.sweep import Sweep, prepared
from tests.kills import PLAN
from tests.stub import SIX, loader, mini_alone, noted, planned

ROOT = Path(__file__).parent.parent
KILLS, SEED = 50, 0


@pytest.fixture(scope="module", autouse=True)
def _light():
    """Keep what is loaded out of the garbage collections that statsmodels asks for at every adjustment, and lm-eval's tasks unread."""
    gc.freeze()
    with mini_alone():
        yield
    gc.unfreeze()


@pytest.fixture
def swept(tmp_path):
    """Run a sweep of a stub in `tmp_path/run`; give the run and what the stub was asked this time."""

    def run(folder: str = "run", **changes: Any) -> tuple[Store, list[Any]]:
        log = tmp_path / f"{folder}.log"
        before = len(noted(log))
        store = Sweep(planned(**changes), tmp_path / folder, loader=loader(log), say=lambda line: None).run()
        return store, noted(log)[before:]

    return run


def reports(folder: Path, capsys) -> dict[str, str]:
    """What `evalkit report` prints of a run, in every format to keep; seconds aside."""
    printed = {}
    for kind in ("json", "md", "csv"):
        cli.report(folder, kind=kind)
        printed[kind] = capsys.readouterr().out
    told = json.loads(printed["json"])
    assert set(told.pop("aside")) == {"created", "machine", "command", "seconds", "computed_tokens", "cells", "pareto"}
    return {**printed, "json": json.dumps(told)}


def exported(folder: Path) -> dict[str, str]:
    """lm-eval's files of a run, without the date in their names and in them."""
    date = Store.open(folder).manifest["created"]
    files = [path for path in folder.glob("cells/**/*") if path.is_file() and not path.name.startswith(".")]
    plain = lambda text: text.replace(date, "DATE").replace(date.replace(":", "-"), "DATE")  # noqa: E731
    return {plain(str(path.relative_to(folder))): plain(path.read_text()) for path in files}


# Killed


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, Mapping[str, Any]]:
    """A folder of runs that were killed all the time and finished at last, and what the kills left each time."""
    folder = tmp_path_factory.mktemp("kills")
    command = [sys.executable, "-m", "tests.kills", str(folder), str(KILLS), str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_kills_land_everywhere(killed):
    left = [state for _, states in killed[1]["runs"] for state in states]
    assert len(left) == KILLS
    packs, cells = 2 * 2 * PLAN["limit"], 2 * len(PLAN["protocols"])
    assert any(not state["begun"] for state in left), "none before the run began"
    assert any(0 < len(state["recorded"]) < packs for state in left), "none among the packs"
    assert any(0 < state["exported"] < cells for state in left), "none while lm-eval's files were written"


def test_a_killed_sweep_ends_with_the_undisturbed_ones_bytes(killed, capsys):
    folder, runs = killed
    wanted = reports(folder / "undisturbed", capsys), exported(folder / "undisturbed")
    assert len(wanted[1]) == 4 * (1 + 2)
    for run, _ in runs["runs"]:
        assert (reports(Path(run), capsys), exported(Path(run))) == wanted, run


def test_what_was_recorded_before_a_kill_is_never_scored_again(killed):
    for run, states in killed[1]["runs"]:
        asked = noted(Path(run).with_suffix(".log"))
        for state in states:
            after = asked[state["noted"] :]
            assert [pack for pack in state["recorded"] if pack in after] == [], run
        assert "it is now" not in Path(run).with_suffix(".err").read_text(), "a kill damaged a pack"


def test_a_kill_costs_the_documents_in_flight_at_most(killed):
    for run, states in killed[1]["runs"]:
        scored = [line for line in noted(Path(run).with_suffix(".log")) if line != "loaded"]
        assert len(scored) <= 2 * 2 * PLAN["limit"] + len(states), run


# Taken up again


def test_a_finished_run_scores_nothing_and_loads_no_model(swept, capsys):
    first, asked = swept()
    assert asked[0] == "loaded"
    assert len(asked) == 1 + len(first.names())
    before = reports(first.folder, capsys)
    again, asked = swept()
    assert asked == []
    assert (again.digest, reports(again.folder, capsys)) == (first.digest, before)


def test_a_finished_run_takes_over_another_title_without_a_model(swept):
    swept()
    store, asked = swept(title="Another")
    assert asked == []
    assert Store.open(store.folder).manifest["shown"]["title"] == "Another"


def test_a_pack_that_is_gone_or_damaged_is_scored_anew_and_alone(swept, tmp_path, capsys):
    store, _ = swept()
    before = reports(store.folder, capsys)
    gone, damaged = store.names()[0], store.names()[3]
    gone.path(store.folder).unlink()
    damaged.path(store.folder).write_text("{")
    lines: list[str] = []
    Sweep(planned(), store.folder, loader=loader(tmp_path / "again.log"), say=lines.append).run()
    scored = [[name.task, "prompt", store.documents_of(name)] for name in (gone, damaged)]
    assert noted(tmp_path / "again.log") == ["loaded", *scored]
    said = next(place for place, line in enumerate(lines) if "is cut short or was changed" in line)
    assert lines[said].startswith(f"evalkit: {damaged.path(store.folder)} ")
    (aside,) = store.folder.rglob("*.damaged")
    assert str(aside) in lines[said + 1]
    assert aside.read_text() == "{"
    assert reports(store.folder, capsys) == before


def test_lm_evals_files_that_are_gone_come_back_without_a_model(swept):
    store, _ = swept()
    before = exported(store.folder)
    for path in list(store.folder.glob("cells/*/*/h2o*/*")):
        path.unlink()
    assert swept()[1] == []
    assert exported(store.folder) == before


def test_another_plan_in_the_folder_is_refused_and_moved_aside_only_if_asked(swept, tmp_path, capsys):
    store, _ = swept()
    packs = sorted(store.folder.rglob("*.jsonl"))
    with pytest.raises(OtherRun, match=r"holds another run \(plan.limit: here 5, there 6\)"):
        swept(limit=5)
    assert sorted(store.folder.rglob("*.jsonl")) == packs
    lines: list[str] = []
    job = Sweep(planned(limit=5), store.folder, loader=loader(tmp_path / "log"))
    anew(job.folder, job.run, lines.append)
    assert lines == [f"evalkit: {store.folder} held another run, which is now {store.folder}.1"]
    assert Store.open(tmp_path / "run.1").digest == store.digest
    assert not Run.load(store.folder).missing


def test_another_model_of_the_name_is_refused_where_anything_is_missing(swept, tmp_path):
    store, _ = swept()
    store.names()[0].path(store.folder).unlink()
    with pytest.raises(OtherRun, match=r'models\.0\.digest: here "another", there "0000000000000000"'):
        Sweep(planned(), store.folder, loader=loader(tmp_path / "log", digest="another")).run()


def test_a_full_disk_ends_a_sweep_with_one_line_and_it_goes_on_from_there(swept, tmp_path, monkeypatch, capsys):
    wanted = reports(swept("undisturbed")[0].folder, capsys)
    record, left = sweep.record, iter(range(3))

    def full(*given: Any) -> None:
        if next(left, None) is None:
            raise UsageError("the disk is full")
        record(*given)

    monkeypatch.setattr(sweep, "record", full)
    with pytest.raises(UsageError, match="the disk is full"):
        swept()
    monkeypatch.undo()
    store, asked = swept()
    assert len(asked) == 1 + len(store.names()) - 3
    assert reports(store.folder, capsys) == wanted


# Subsets


def asked_of(store: Store, task: str) -> list[int]:
    return [document["doc_id"] for document in store.documents(task)]


def test_a_subset_is_the_same_in_every_cell_and_whatever_else_is_asked(swept):
    few, _ = swept("few", tasks=["mini_copa"])
    many, _ = swept("many", tasks=["mini_piqa", "mini_copa"], policies=["tova"], protocols=["prompt", "stream"])
    assert asked_of(few, "mini_copa") == asked_of(many, "mini_copa")
    run = Run.load(many.folder)
    for cell in run.cells:
        for task in run.tasks:
            assert run.answers[cell.key, task.name].doc_ids.tolist() == asked_of(many, task.name)
            assert (task.documents, task.subset) == (6, True)


def test_subsets_differ_by_seed_and_by_task_and_are_no_prefix(swept):
    first, _ = swept("first")
    second, _ = swept("second", seeds={"subset": 1})
    drawn_ = [asked_of(store, task) for store in (first, second) for task in ("mini_copa", "mini_boolq")]
    assert len({tuple(ids) for ids in [*drawn_, list(range(6))]}) == 5


def test_a_smaller_limit_draws_documents_in_order_and_a_larger_one_all():
    assert drawn(0, "task", 1000, 5) == sorted(drawn(0, "task", 1000, 5))
    assert drawn(0, "task", 5, 9) == [0, 1, 2, 3, 4]
    assert len(set(drawn(3, "task", 1000, 500))) == 500


def test_without_a_limit_all_documents_are_asked(swept):
    store, _ = swept(limit=None, tasks=["mini_copa"])
    (task,) = Run.load(store.folder).tasks
    assert asked_of(store, "mini_copa") == list(range(task.total))
    assert not task.subset


# Refused before a model is loaded


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tasks": ["mini_cop"]}, r"task mini_cop is not known \(did you mean 'mini_copa'\?\): see `lm_eval ls tasks`"),
        ({"policies": ["h20"]}, r"policy=h20 is not known \(did you mean 'h2o'\?\)"),
        ({"policies": ["h2o:papr"]}, r"policy=h2o:papr is not known \(did you mean 'paper'\?\)"),
        ({"policies": [{"name": "h2o", "knobs": {"every": 1}}]}, "h2o has no knob 'every'"),
        ({"policies": [{"name": "h2o", "knobs": {"every_step": "perhaps"}}]}, "h2o: every_step='perhaps' is not allowed"),
        ({"policies": ["snapkv"], "protocols": ["prompt", "stream"]}, "cannot run under protocol=stream: use protocol=prompt"),
        ({"policies": ["kivi"], "budgets": [0.01]}, "budget=1%"),
        ({"tasks": ["mini_copa"], "fewshot": 9999}, "task mini_copa has [0-9]+ examples to draw from, fewer than fewshot 9999"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_model_is_loaded(swept, tmp_path, changes, line):
    with pytest.raises(UsageError, match=line) as caught:
        swept(**changes)
    assert "\n" not in str(caught.value)
    assert noted(tmp_path / "run.log") == []
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_task_whose_rows_cannot_be_had_is_one_line(swept, monkeypatch):
    from lm_eval.tasks import TaskManager

    def offline(self: Any, names: Any) -> None:
        raise ConnectionError("cannot reach\nthe hub")

    monkeypatch.setattr(TaskManager, "load", offline)
    line = r"the rows of mini_copa cannot be loaded \(ConnectionError: cannot reach the hub\): give --data DIR"
    with pytest.raises(UsageError, match=line):
        swept(tasks=["mini_copa"])


def test_a_folder_of_other_files_is_refused_before_a_model_is_loaded(swept, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("all of it")
    with pytest.raises(UsageError, match=r"run holds other files and no run\.json"):
        swept()
    assert noted(tmp_path / "run.log") == []


def test_another_plans_folder_is_refused_before_a_model_is_loaded(swept, tmp_path):
    swept()
    asked = len(noted(tmp_path / "run.log"))
    with pytest.raises(OtherRun, match=r"plan\.limit: here 3"):
        swept(limit=3)
    assert len(noted(tmp_path / "run.log")) == asked


def test_another_run_in_the_working_folder_stays_where_it_is(swept, tmp_path, monkeypatch):
    swept()
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(OtherRun, match="holds another run"):
        anew(Path(), Sweep(planned(limit=3), Path(), loader=loader(tmp_path / "anew.log")).run, lambda line: None)
    assert Store.open(tmp_path / "run").manifest["plan"]["limit"] == planned().limit


def test_a_second_sweep_on_the_folder_is_refused(swept, tmp_path):
    with locked(tmp_path / "run"), pytest.raises(UsageError, match="another process is writing to"):
        swept()
    assert swept()[1]


# Versions


def test_a_finished_run_is_not_taken_for_one_with_another_source_or_version(swept, monkeypatch):
    swept()
    monkeypatch.setattr(manifest, "__version__", "9.9.9")
    with pytest.raises(OtherRun, match=r"cells\.0\.key|versions"):
        swept()


# The command


def test_the_command_runs_the_plan_and_prints_the_report(tmp_path, monkeypatch, capsys):
    plan = tmp_path / "small.yaml"
    plan.write_text(planned().model_dump_json())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "Sweep", partial(Sweep, loader=loader(tmp_path / "log")))
    cli.sweep(str(plan), limit=3)
    printed = capsys.readouterr().out
    store = Store.open(tmp_path / "runs" / "small")
    assert store.manifest["plan"]["limit"] == 3
    assert "A stub's run" in printed


def test_a_dry_run_tells_cells_documents_and_time_and_writes_nothing(tmp_path, monkeypatch, capsys):
    plan = tmp_path / "small.yaml"
    plan.write_text(planned().model_dump_json())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "Sweep", partial(Sweep, loader=loader(tmp_path / "log")))
    cli.sweep(str(plan), dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "stub: 5 cells"
    assert [line.split(":")[0].strip() for line in lines[1:3]] == ["mini_copa", "mini_boolq"]
    assert all("6 documents" in line for line in lines[1:3])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("jobs", "ray", "crew"), [(1, None, "alone"), (2, None, "processes"), (1, "auto", "cluster")])
def test_jobs_and_ray_choose_who_scores(monkeypatch, jobs, ray, crew):
    monkeypatch.setattr(sweep, "processes", lambda count: ("processes", count))
    monkeypatch.setattr(sweep, "cluster", lambda address, count: ("cluster", address, count))
    chosen = prepared("demo", None, None, None, jobs, ray)
    assert chosen.folder == Path("runs") / "demo"
    assert chosen.crews == {"alone": spread.alone, "processes": ("processes", 2), "cluster": ("cluster", "auto", None)}[crew]


def test_the_six_mini_tasks_have_what_reports_need(swept):
    store, _ = swept(tasks=[f"mini_{task}" for task in SIX], limit=3)
    for task in store.manifest["tasks"]:
        assert 0.2 < task["chance"] <= 0.5
        assert "acc" in task["metrics"]
        assert all(document["gold"] is not None for document in store.documents(task["name"]))
