"""How a report is told: tables, files and pages, the same whatever the day, and without torch."""

import csv
import io
import json
import subprocess
import sys
from types import ModuleType

import pytest
from handmade import write_by_hand

from evalkit import formats
from evalkit.report import report
from evalkit.runs import Run
from evalkit.sections import save, told
from tests.test_report import BY_HAND, told_text


def test_a_table_has_policies_for_rows_and_budgets_for_columns(tmp_path) -> None:
    write_by_hand(tmp_path, BY_HAND)
    lines = told_text(tmp_path, "md").splitlines()
    start = lines.index("### piqa") + 2
    assert lines[start : start + 4] == [
        "| policy | 10 % | 50 % | 100 % |",
        "|---|---:|---:|---:|",
        "| full |  |  | 87.5 |",
        "| h2o | 0.0 (-87.5*) worse | 62.5 (-25.0) ? | 87.5 (+0.0) ok |",
    ]


@pytest.mark.parametrize("kind", ["md", "csv", "latex"])
def test_the_bytes_depend_on_the_answers_alone(tmp_path, kind) -> None:
    write_by_hand(tmp_path / "one", BY_HAND)
    write_by_hand(tmp_path / "two", BY_HAND, seconds={"total": 99.0}, created="2027-02-02T00:00:00", machine={"system": "else"})
    assert told_text(tmp_path / "one", kind) == told_text(tmp_path / "two", kind)


def test_json_has_what_depends_on_the_day_in_one_place(tmp_path) -> None:
    write_by_hand(tmp_path / "one", BY_HAND)
    write_by_hand(tmp_path / "two", BY_HAND, seconds={"total": 99.0}, created="2027-02-02T00:00:00")
    one, two = (json.loads(told_text(tmp_path / name, "json")) for name in ("one", "two"))
    assert (one["aside"]["seconds"], two["aside"]["seconds"]) == (6.0, 396.0)
    assert one.pop("aside") != two.pop("aside")
    assert one == two
    assert "seconds" not in json.dumps(one)


def test_csv_has_a_row_for_each_cell_and_task_and_the_mean(tmp_path) -> None:
    write_by_hand(tmp_path, BY_HAND)
    rows = list(csv.DictReader(io.StringIO(told_text(tmp_path, "csv"))))
    assert [(row["label"], row["task"]) for row in rows[3:6]] == [("h2o@10%", task) for task in ("piqa", "copa", "mean")]
    assert len(rows) == 4 * 3
    assert float(rows[3]["difference"]) == -7 / 8
    assert float(rows[5]["difference"]) == -7 / 16
    assert (rows[0]["difference"], rows[3]["verdict"], rows[3]["chance"]) == ("", "worse", "0.5")


def test_latex_is_booktabs_with_everything_escaped(tmp_path) -> None:
    given = {label: {"a_task": right["piqa"]} for label, right in BY_HAND.items()}
    write_by_hand(tmp_path, given, shown={"title": "50 % & #1 {x} \\ ~ ^ $", "margin": 1.0, "reference": None})
    text = told_text(tmp_path, "latex")
    assert r"\section*{50 \% \& \#1 \{x\} \textbackslash{} \textasciitilde{} \textasciicircum{} \$}" in text
    assert r"\subsubsection*{a\_task}" in text
    assert "policy & 10 \\% & 50 \\% & 100 \\% \\\\\n\\midrule\nfull &  &  & 87.5 \\\\\n" in text
    assert r"h2o & 0.0 ($-$87.5*) worse & 62.5 ($-$25.0) ? & 87.5 ($+$0.0) ok \\" in text
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == text.count(r"\end{tabular}") == 3


def test_names_cannot_break_out_of_a_table(tmp_path, capsys) -> None:
    given = {label: {"a|b<script>[red]": right["piqa"]} for label, right in BY_HAND.items()}
    write_by_hand(tmp_path, given)
    assert "### a\\|b&lt;script>[red]" in told_text(tmp_path, "md")
    told(report(Run.load(tmp_path))).put("terminal")
    assert "a|b<script>[red]" in capsys.readouterr().out


def test_the_terminal_shows_tables_knees_and_how_to_read_them(tmp_path, command) -> None:
    write_by_hand(tmp_path, BY_HAND)
    code, out, err = command("report", tmp_path)
    assert (code, err) == (0, "")
    assert "0.0 (-87.5*) worse" in out
    assert "h2o: smallest budget that is ok: none of those measured (mean)" in out
    assert "lies above -1.0 points" in out


def test_a_folder_of_results_holds_no_text_of_documents(tmp_path, command, monkeypatch) -> None:
    write_by_hand(tmp_path / "run", BY_HAND)
    plots = ModuleType("evalkit.plots")
    plots.save = lambda found, folder: [folder / f"{group['model']}.svg" for group in found["groups"]]
    monkeypatch.setitem(sys.modules, "evalkit.plots", plots)
    monkeypatch.setattr("evalkit.plots", plots, raising=False)
    code, out, err = command("report", tmp_path / "run", "--out", tmp_path / "out", "--format", "json")
    assert code == 0
    assert err.splitlines() == [str(tmp_path / "out" / name) for name in ("report.md", "report.csv", "report.json", "smol.svg")]
    assert (tmp_path / "out" / "report.json").read_text() == out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.csv", "report.json", "report.md"]
    assert not any("Whatever is asked" in path.read_text() for path in (tmp_path / "out").iterdir())


def test_a_page_is_made_of_the_run_and_its_report(tmp_path, command, monkeypatch) -> None:
    write_by_hand(tmp_path / "run", BY_HAND)
    html = ModuleType("evalkit.html")
    html.page = lambda run, found: f"<p>{run.documents('piqa')[0]['doc_id']} {found['title']}"
    monkeypatch.setitem(sys.modules, "evalkit.html", html)
    code, out, err = command("report", tmp_path / "run", "--html", tmp_path / "page.html", "--format", "csv")
    assert (code, err) == (0, f"{tmp_path / 'page.html'}\n")
    assert (tmp_path / "page.html").read_text() == "<p>0 By hand."
    assert out.startswith("model,protocol,policy,")


def test_a_saved_report_says_what_a_printed_one_says(tmp_path) -> None:
    write_by_hand(tmp_path / "run", BY_HAND)
    for path in save(report(Run.load(tmp_path / "run")), tmp_path / "out"):
        assert path.read_text() == told_text(tmp_path / "run", path.suffix[1:])


def test_it_needs_neither_torch_nor_transformers_nor_lm_eval(tmp_path) -> None:
    write_by_hand(tmp_path, BY_HAND)
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "lm_eval"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Refuse())
from evalkit.cli import app
for words in (["report", sys.argv[1], "--format", "md"], ["compare", sys.argv[1], sys.argv[1], "--format", "md"]):
    app(words, standalone_mode=False)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| h2o | 0.0 (-87.5*) worse |" in done.stdout
    assert "In nothing: model, kernel, versions, plan and data are the same." in done.stdout


def test_an_unknown_format_is_told_the_nearest_one(tmp_path, command) -> None:
    write_by_hand(tmp_path, BY_HAND)
    expected = "evalkit: error: unknown format 'latx' (did you mean 'latex'?): give terminal, md, csv, latex, json\n"
    assert command("report", tmp_path, "--format", "latx") == (2, "", expected)


def test_every_format_but_the_terminals_is_text(tmp_path) -> None:
    write_by_hand(tmp_path, BY_HAND)
    assert all(told_text(tmp_path, kind) for kind in formats.FORMATS if kind != "terminal")
