"""Perf runs: what is asked, measured and recorded; memory that runs out is a point, and a run goes on where it was left."""

import json
from dataclasses import replace

import pytest
import torch

from evalkit.errors import UsageError
from evalkit.formats import markdown
from evalkit.gallery import show
from evalkit.model import tiny
from evalkit.perf import asked, measure, plots, report, sections
from evalkit.perf.asked import Asked, Cell, bytes_of, chosen, counts
from evalkit.perf.child import Round, kept, measured, ran_out
from evalkit.perf.mass import looks, mass
from evalkit.perf.measure import Meter
from evalkit.perf.records import OK, OUT_OF_MEMORY, Points
from evalkit.perf.run import Perf, ends_for_memory, turns
from evalkit.policies import build
from evalkit.session import Engine
from tests.tiny import tokens

FULL, H2O = Cell("full", "full", "100%"), Cell("h2o@20%", "h2o", "20%")
POLICIES = "full,h2o,snapkv,streaming_llm,quest,infinigen,tova,knorm,random"


@pytest.fixture(scope="module")
def meter(own_cache):
    text = tokens(120, 7)
    return Meter(Engine(tiny(1), calibration=lambda: text), text)


# What is asked


def test_numbers_and_bytes_are_read_or_refused():
    assert counts("2k, 512,1k", "prompt-tokens") == (512, 1024, 2048)
    assert (bytes_of("4G"), bytes_of("512MiB"), bytes_of("1.5g"), bytes_of(None)) == (4 << 30, 512 << 20, 3 << 29, None)
    with pytest.raises(UsageError, match="prompt-tokens=many"):
        counts("many", "prompt-tokens")
    with pytest.raises(UsageError, match="memory-cap=lots"):
        bytes_of("lots")


def test_full_comes_first_and_once_and_budgets_are_for_policies():
    cells, refused = chosen("h2o,full,h2o", "0.1,0.2,10%")
    assert [cell.label for cell in cells] == ["full", "h2o@10%", "h2o@20%"]
    assert refused == []


def test_the_naive_way_is_of_a_policy_that_is_measured():
    cells, _ = chosen("h2o", "0.2", naive="h2o", uncounted=True)
    assert [(cell.label, cell.naive, cell.counted) for cell in cells][2:] == [
        ("h2o@20%, T x T", True, True), ("full, nothing counted", False, False),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="naive=tova"):
        chosen("h2o", "0.2", naive="tova")


def test_a_larger_batch_has_the_smaller_ones_prompts():
    run = Asked(kind=asked.BATCH, cells=(FULL,), over=(2, 64), prompt_tokens=400, output_tokens=8)
    few, many = run.prompts(2), run.prompts(64)
    assert many[:2] == few
    assert 100 <= min(many) < 140 < 360 < max(many) <= 400
    assert run.positions == max(many) + 7


def test_each_round_begins_with_another_policy():
    run = Asked(kind=asked.TTFT, cells=(FULL, H2O), over=(64,))
    assert [run.turn(repeat)[0] for repeat in range(3)] == [FULL, H2O, FULL]


# What is measured


@pytest.mark.parametrize("cell", chosen(POLICIES, "20%")[0], ids=lambda cell: cell.label)
def test_what_is_held_is_what_the_policys_own_account_says(meter, cell):
    point, _ = meter.measure(cell, [70, 41], 3)
    assert sum(point["held"]["entries"]) == point["tally"]["held"]
    stored = sum(point["held"]["device_bytes"]) + sum(point["held"]["host_bytes"])
    assert stored == point["tally"]["bytes"]
    assert (point["prompt_tokens"], point["output_tokens"]) == (111, 6)
    assert (sum(point["held"]["host_bytes"]) > 0) == (cell.policy == "infinigen")


def test_an_account_that_is_wrong_stops_the_run(meter, monkeypatch):
    monkeypatch.setattr(
        measure, "sizes", lambda policy, shape, load: [replace_entries(size) for size in SIZES(policy, shape, load)]
    )
    with pytest.raises(UsageError, match="holds 84 entries after the prompt where its own account says 90"):
        meter.measure(H2O, [71], 1)


SIZES = measure.sizes


def replace_entries(size):
    return size._replace(entries=size.entries + 2)


def test_the_naive_way_and_counting_nothing_change_no_result(meter):
    said = []
    for cell in (H2O, replace(H2O, naive=True), replace(H2O, counted=False)):
        engine = meter.naive if cell.naive else meter.engine
        session = engine.open(build("h2o", "20%"))
        with measure.in_one_piece():
            session.feed(meter.prompt(70))
        said.append(session.generate(4, lambda said: False))
    assert said[0] == said[1] == said[2]


def test_where_nothing_is_counted_there_are_seconds_alone(meter):
    point, _ = meter.measure(replace(FULL, counted=False), [40], 2)
    assert set(point["seconds"]) == {"prefill", "decode"}
    assert not {"held", "tally", "model_seconds"} & set(point)


# How much of full's attention is kept


def seen(name, budget="100%", count=60):
    engine = Engine(tiny(1), calibration=lambda: tokens(120, 7))
    session = engine.open(build(name, budget))
    session.feed(tokens(count))
    return session, looks(session)


def test_full_keeps_all_of_its_attention_and_looking_changes_nothing():
    session, full = seen("full")
    assert mass(full, full) == pytest.approx(1.0)
    untouched, _ = seen("full")
    assert session.generate(3, lambda said: False) == untouched.generate(3, lambda said: False)
    assert session.engine.counters.tokens["decoded"] == 3


@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "quest", "infinigen", "random"])
def test_what_a_policy_keeps_is_the_weight_at_the_positions_it_reads(name):
    _, full = seen("full")
    session, own = seen(name, "30%")
    share = mass(full, own)
    assert 0 < share < 1
    if name in ("h2o", "streaming_llm", "random"):  # what is held is read, and the token itself
        held = [
            [look.weights[head][:, [*cache.positions[0, head].tolist(), 59]].sum(-1) for head in range(2)]
            for look, cache in zip(full, session.caches, strict=True)
        ]
        assert share == pytest.approx(float(torch.stack([part for layer in held for part in layer]).mean()))


def test_nothing_is_kept_where_full_was_not_seen():
    assert kept({"h2o@20%": seen("h2o", "20%")[1]}) == {}


# Runs


def asking(**given):
    return Asked(**{"kind": asked.TTFT, "cells": (FULL, H2O), "over": (40, 80), "repeats": 1, "model": asked.TINY, **given})


def test_a_round_tells_what_each_cell_took_in_turn():
    words = list(measured(Round(asking(), 40, (H2O, FULL), look=True)))
    assert [word[:2] for word in words[:4]] == [("begins", "h2o@20%"), ("took", "h2o@20%"), ("begins", "full"), ("took", "full")]
    assert words[4][0] == "kept"
    assert words[4][1]["full"] == pytest.approx(1.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perf")
    return Perf(asking(), folder, say=lambda line: None).run()


def test_a_run_is_recorded_and_taken_up(run):
    assert [(point["at"], point["cell"], point["outcome"]) for point in run.points()] == [
        (at, cell, OK) for at in (40, 80) for cell in ("full", "h2o@20%")
    ]
    first, last = run.names()
    written = first.path(run.folder).read_bytes()
    last.path(run.folder).unlink()
    again = Perf(asking(), run.folder, say=lambda line: None).run()
    assert again.missing() == []
    assert first.path(run.folder).read_bytes() == written
    lines = (run.folder / "points.jsonl").read_text().splitlines()
    assert [json.loads(line)["at"] for line in lines] == [40, 40, 80, 80]


def test_another_run_is_refused_before_a_model_is_loaded(run):
    with pytest.raises(UsageError, match="holds another run"):
        Perf(asking(repeats=2, model="no such model"), run.folder).run()


def test_more_tokens_than_positions_are_refused(tmp_path):
    with pytest.raises(UsageError, match="131073 tokens are more than the model's 131072 positions"):
        Perf(asking(over=(131073,)), tmp_path, say=lambda line: None).run()


def test_a_policy_that_runs_out_of_memory_is_a_point_and_the_others_go_on():
    """4096 tokens make weights of 256 MiB a layer in one piece, and hardly anything in blocks."""
    naive = replace(H2O, label="naive", naive=True)
    cells = (FULL, naive, H2O)
    most = resident() + (400 << 20)
    found = turns(asking(cells=cells, memory_cap=most), 4096, cells, look=False)
    assert [found[cell.label]["outcome"] for cell in cells] == [OK, OUT_OF_MEMORY, OK]


def test_a_signal_that_is_not_about_memory_stops_the_run():
    assert ends_for_memory(9, capped=False)
    assert ends_for_memory(6, capped=True)
    assert not ends_for_memory(6, capped=False)
    assert not ends_for_memory(15, capped=True)


def resident():
    """What a process takes that holds the tiny model."""
    (point,) = [found["memory"]["host_start_bytes"] for found in turns(asking(), 40, (FULL,), look=False).values()]
    return point


def test_a_cap_below_the_models_own_memory_is_refused():
    with pytest.raises(UsageError, match="memory-cap=1048576 bytes are less than"):
        turns(asking(memory_cap=1 << 20), 40, (FULL,), look=False)


def test_only_errors_about_memory_are_taken_for_that():
    assert ran_out(MemoryError())
    assert ran_out(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."))
    assert not ran_out(RuntimeError("shapes do not match"))


# Reports


def test_a_report_has_medians_ranges_and_ratios_of_the_same_round(run):
    manifest = {**run.manifest, "asked": {**run.manifest["asked"], "repeats": 3}}
    points = [
        {"at": 40, "repeat": repeat, "cell": cell, "outcome": OK, "ttft": {"mean": seconds}}
        for repeat, pair in enumerate([(1.0, 2.0), (2.0, 2.0), (4.0, 6.0)])
        for cell, seconds in zip(("full", "h2o@20%"), pair, strict=True)
    ]
    full, h2o = report.Report(manifest, points, 0, "").rows
    assert (full["ttft"], full["ttft_low"], full["ttft_high"], full["n"]) == (2.0, 1.0, 4.0, 3)
    assert (h2o["ratio"], h2o["ratio_low"], h2o["ratio_high"]) == (1.5, 1.0, 2.0)
    assert h2o["held"] is None


def test_tables_and_plots_say_what_ran_out_and_leave_out_what_was_not_counted(run, tmp_path):
    found = report.opened(run.folder)
    points = [
        point if point["cell"] == "full" or point["at"] == 40 else {**point, "outcome": OUT_OF_MEMORY} for point in found.points
    ]
    short = replace(found, points=points)
    text = markdown(sections.told(short).sections)
    line = next(line for line in text.splitlines() if line.startswith("| h2o@20% |"))
    assert line.endswith("| out of memory |")
    assert "bytes held in host memory" not in text
    drawn = plots.save(short.as_dict(), tmp_path)
    assert [path.name for path in drawn] == ["ttft-tiny.png", "ttft-tiny.svg"]
    assert "out of memory" in drawn[1].read_text()


def test_the_command_measures_and_reports(command, tmp_path):
    code, out, err = command(
        "perf", "decode", "--model", "tiny", "--policy", "h2o", "--prompt-tokens", "80", "--output-tokens", "3", "--repeats", "1",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert (code, err.count("done")) == (0, 1)
    assert "time per output token, over full's" in out
    code, out, _ = command("report", tmp_path / "run", "--format", "json", "--out", tmp_path / "told")
    told = json.loads(out)
    assert [(row["cell"], row["at"]) for row in told["rows"]] == [("full", 3), ("h2o@20%", 3)]
    assert all(row["tpot"] > 0 and row["held"] <= 1 for row in told["rows"])
    assert {path.suffix for path in (tmp_path / "told").iterdir()} == {".md", ".csv", ".json", ".png", ".svg"}
    assert Points.open(tmp_path / "run").missing() == []
    show(tmp_path)
    shown = (tmp_path / "README.md").read_text()
    assert "#### time per output token, over full's" in shown
    assert "![told](told/decode-tiny.svg)" in shown


def test_a_page_of_a_perf_run_is_refused(command, run, tmp_path):
    code, _, err = command("report", run.folder, "--html", tmp_path / "page.html")
    assert code == 2
    assert "--html is for sweeps and retention runs" in err
