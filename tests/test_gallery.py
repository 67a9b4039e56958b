"""The results' README and the marked parts of another one are what the reports say."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evalkit.cli import app
from evalkit.errors import UsageError
from evalkit.gallery import show
from tests import recalled
from tests.fakes import write_run

ROOT = Path(__file__).parent.parent
pytest.importorskip("matplotlib", reason="plots need matplotlib")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """A folder with one report."""
    folder = tmp_path_factory.mktemp("gallery")
    write_run(folder / "run")
    saved = CliRunner().invoke(app, ["report", str(folder / "run"), "--format", "csv", "--out", str(folder / "results" / "first")])
    assert saved.exit_code == 0, saved.output
    return folder / "results"


def test_a_report_is_shown_with_a_line_for_each_cell_and_its_curves(results):
    show(results)
    text = (results / "README.md").read_text()
    assert [line.split(" |")[0].strip("| ") for line in text.splitlines() if line.startswith("| h2o")] == [
        "h2o@2%",
        "h2o@10%",
        "h2o@50%",
        "h2o@100%",
    ]
    full = next(line for line in text.splitlines() if line.startswith("| full"))
    assert full == "| full@100% | 65.6 ±4.9 | 45.8 ±5.1 | 65.6 ±4.5 | 59.0 ±2.8 |  | 100 % | 100 % | 0 % |"
    assert (results / "first" / "accuracy-smol-prompt.svg").is_file()
    assert "(first/accuracy-smol-prompt.svg)" in text


def test_the_marked_parts_of_a_text_are_written_anew_and_nothing_else(results, tmp_path):
    text = tmp_path / "README.md"
    text.write_text("before\n<!-- results: first -->\nold\n<!-- end -->\nafter\n")
    show(results, text)
    once = text.read_text()
    assert once.startswith("before\n<!-- results: first -->\nA made-up run.")
    assert once.endswith("<!-- end -->\nafter\n")
    assert "old" not in once
    assert "(results/first/report.md)" in once
    show(results, text)
    assert text.read_text() == once


def test_a_folder_without_reports_and_a_mark_without_one_are_refused_in_a_line(results, tmp_path):
    with pytest.raises(UsageError, match="holds no reports"):
        show(tmp_path)
    text = tmp_path / "README.md"
    text.write_text("<!-- results: second -->\n<!-- end -->\n")
    with pytest.raises(UsageError, match="second holds no whole report"):
        show(results, text)


def test_the_readme_and_the_results_show_what_the_reports_say(tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    show(tmp_path / "results", tmp_path / "README.md")
    for name in ("README.md", "results/README.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"{name}: run `evalkit gallery --readme README.md`"


@pytest.fixture
def both(results, tmp_path) -> Path:
    """A folder with a sweep's report and one of retention."""
    shutil.copytree(results, tmp_path / "results")
    recalled.write_run(tmp_path / "run")
    words = ["report", str(tmp_path / "run"), "--format", "csv", "--out", str(tmp_path / "results" / "recall")]
    saved = CliRunner().invoke(app, words)
    assert saved.exit_code == 0, saved.output
    return tmp_path / "results"


def test_a_retention_report_stands_beside_a_sweep_with_its_table_its_figures_and_its_command(both):
    show(both)
    first, second = (both / "README.md").read_text().split("## recall\n")
    assert "| h2o@10% |" in first
    assert "recall (float32, cpu), `replies=replay`, `source=builtin`, asked after turns 2, 4, 6" in second
    assert "| policy | 1k-2k | 2k-4k |" in second
    report = (both / "recall" / "report.md").read_text().splitlines()
    table = [line for line in second.splitlines() if line.startswith(("| full", "| control", "| h2o", "| random"))]
    assert len(table) == 4 and set(table) <= set(report)
    assert "1k-2k: 14 conversations: 14 whole." in second and "test instrument" in second
    assert "(recall/buckets-recall.svg)" in second and "(recall/turns-recall.svg)" in second
    assert f"Made by `{json.loads((both / 'recall' / 'report.json').read_text())['aside']['command']}`" in second


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "holds no whole report"),
        ("[]", "is no report of evalkit's"),
        ("{}", r"is no report of evalkit's \(KeyError: 'title'\)"),
        ('{"title": "x", "groups": [{"model": "m"}]}', "is no report of evalkit's"),
        ('{"title": "x", "groups": 3}', "is no report of evalkit's"),
        ('{"title": "x", "groups": [], "aside": null}', "is no report of evalkit's"),
        ('{"title": "x", "kind": "retention"}', "is no report of evalkit's"),
    ],
)
def test_a_malformed_report_is_a_line_that_names_it(text, told, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "report.json").write_text(text)
    with pytest.raises(UsageError, match=told) as caught:
        show(tmp_path)
    assert "odd" in str(caught.value) and "write it with `evalkit report RUN --out" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "README.md").exists()
