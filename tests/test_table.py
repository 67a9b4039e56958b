"""Tables of accuracy against budget, their provenance, and the speed comparison, on a tiny model."""

import json
from pathlib import Path

import pytest

from evalkit import bench, table
from evalkit.errors import UsageError
from evalkit.harness.model import PolicyLM, plain_hf
from tests.saved import save

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


def asked(folder, **given):
    settings = {"tasks": ["mini_copa"], "policies": ["full", "h2o"], "budgets": ["0.2", "50%"], "limit": 4}
    return table.Asked(**{**settings, "model_args": f"pretrained={folder},dtype=float64", **given})


def test_full_stands_once_and_the_others_at_every_budget(folder):
    assert list(asked(folder).cells()) == ["full@100%", "h2o@20%", "h2o@50%"]


def test_a_policy_that_refuses_the_protocol_stops_the_table_before_a_model_loads():
    with pytest.raises(UsageError, match="protocol=stream"):
        table.make(asked("nowhere", policies=["snapkv"], protocol="stream"))


def test_an_unknown_task_is_refused_with_the_nearest(folder):
    with pytest.raises(UsageError, match=r"task mini_cop is not known.*'mini_copa'"):
        table.make(asked(folder, tasks=["mini_cop"]))


def test_a_table_has_a_line_for_each_cell_and_says_where_it_comes_from(folder, tmp_path):
    rows, provenance = table.make(asked(folder))
    table.save(tmp_path, rows, provenance)
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["full@100%", "h2o@20%", "h2o@50%"]
    saved = json.loads((tmp_path / "table.json").read_text())
    assert saved["provenance"]["model_digest"] in "\n".join(lines)
    assert [row["evalkit"]["acted"] for row in saved["rows"]] == [0.0, 1.0, 1.0]
    assert saved["rows"][1]["evalkit"]["held"] <= 0.2
    accuracy, n = saved["rows"][0]["acc"], saved["rows"][0]["n"]
    assert saved["rows"][0]["stderr"] == pytest.approx((accuracy * (1 - accuracy) / (n - 1)) ** 0.5)


def test_the_readme_shows_the_tables_in_results():
    readme = (ROOT / "README.md").read_text()
    for results in sorted((ROOT / "results").glob("*/table.md")):
        shown = [line for line in results.read_text().splitlines() if line.startswith("|")]
        assert "\n".join(shown) in readme, f"README.md does not show {results.relative_to(ROOT)} as it is"


def test_the_speed_comparison_runs_and_both_sides_agree(folder, monkeypatch, capsys):
    given = {"dtype": "float64", "device": "cpu"}
    sides = (plain_hf(str(folder), **given), PolicyLM(str(folder), policy="full", **given))
    monkeypatch.setattr(bench, "_models", lambda: sides)
    monkeypatch.setattr(bench, "HF_BATCHES", (1,))
    monkeypatch.setattr(bench, "ROW_TOKENS", (256,))
    bench.run(None, limit=2, repeats=1, tasks=["mini_copa"])
    printed = capsys.readouterr().out
    assert printed.count("greedy flags differing 0") == 2
    assert all(f"{side} / " in printed for side in ("full prompt", "h2o prompt", "h2o stream", "infinigen stream"))
