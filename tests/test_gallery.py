"""The results' README and the marked parts of another one are what the reports say."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evalkit.cli import app
from evalkit.errors import UsageError
from evalkit.gallery import show
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
