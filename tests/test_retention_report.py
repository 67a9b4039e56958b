"""What is made of a retention run: rows and their tests by hand, tables, folders, and what is said of runs that lack something."""

import csv
import json
import math
from dataclasses import replace

import pytest

from evalkit import stats
from evalkit.errors import UsageError
from evalkit.retention.clusters import LEAST, clusters
from evalkit.retention.protocol import load as protocol
from evalkit.retention.records import Records
from evalkit.retention.report import Report, adjust, opened
from evalkit.retention.run import listed, manifest
from evalkit.retention.scripts import Script
from evalkit.retention.sections import accuracy, told
from evalkit.store import Store
from tests.recalled import BUCKETS, SAYS, TURNS, query, scripts, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "made"
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def report(folder) -> Report:
    return opened(folder)


# By hand


def by_hand(folder, rights, skip=0, budget="30%", margin="20", **changed) -> Report:
    """A run of two turns in which each cell's answers are given: label -> conversation -> turn -> right."""
    labels = list(rights)
    asked = protocol(
        given={"policy": ",".join(label.split("@")[0] for label in labels), "turns": "1,2", "bucket": "1k-2k", "conversations": "5",
               "together": "1", "control": "false", "model": "m", "budget": budget, "margin": margin}
    )  # fmt: skip
    told = scripts("1k-2k", [(f"c{number // 2}",) for number in range(len(rights[labels[0]]))])
    chosen = {"1k-2k": [Script(one.id, one.making, one.sources, one.exchanges[:2], (2,), one.fact) for one in told]}
    store = Records.create(folder, manifest(asked, {"digest": "0"}, chosen, listed(asked)))
    names = store.names()
    for name in names[: len(names) - skip]:
        right = rights[store.cell_of(name)["label"]][name.number]
        store.record(name, [[query(turn + 1, one, **changed) for turn, one in enumerate(right)]], {"seconds": {}})
    return Report.of(store)


RIGHTS = {
    "full@100%": [(True, True), (True, True), (True, False), (True, True)],
    "h2o@30%": [(True, False), (True, False), (False, True), (True, False)],
}


def test_rows_count_what_is_right_and_pair_it_with_full(tmp_path):
    rows = {(row["policy"], row["turn"]): row for row in by_hand(tmp_path, RIGHTS).rows}
    assert {at: (row["n"], row["correct"]) for at, row in rows.items()} == {
        ("full", "all"): (8, 7), ("full", 1): (4, 4), ("full", 2): (4, 3),
        ("h2o", "all"): (8, 4), ("h2o", 1): (4, 3), ("h2o", 2): (4, 1),
    }  # fmt: skip
    found = rows["h2o", 2]
    assert (found["difference"], found["lost"], found["gained"]) == (-0.5, 3, 1)
    assert rows["full", 2]["difference"] is None
    assert found["held"] == pytest.approx(0.3) and found["read"] == pytest.approx(0.25)


def test_intervals_are_clustered_by_conversation(tmp_path):
    row = next(row for row in by_hand(tmp_path, RIGHTS).rows if (row["policy"], row["turn"]) == ("h2o", "all"))
    full, other = ([int(one) for pair in RIGHTS[label] for one in pair] for label in RIGHTS)
    expected = stats.paired(full, other, ["c0"] * 4 + ["c1"] * 4)
    assert (row["difference_low"], row["difference_high"], row["p"]) == (expected.low, expected.high, expected.p)


def test_an_unfinished_run_says_so_and_pairs_what_is_there(tmp_path):
    report = by_hand(tmp_path, RIGHTS, skip=1)
    assert report.missing == 1
    assert {(row["policy"], row["n"]) for row in report.rows if row["turn"] == "all"} == {("full", 8), ("h2o", 6)}
    assert "Not finished: packs of conversations missing: 1." in told(report).text("md")


def test_a_run_that_has_just_begun_is_told_in_every_format(tmp_path):
    report = by_hand(tmp_path, RIGHTS, skip=8)
    assert "Not finished: packs of conversations missing: 8." in told(report).text("md")
    assert told(report).text("csv") == ""
    assert json.loads(told(report).text("json"))["rows"] == []


def test_scorers_that_differ_agree_less(tmp_path):
    report = by_hand(tmp_path, RIGHTS)
    assert report.kappas()["contains and fuzzy"] == 1.0
    other = Report(report.manifest, [{**one, "first": number % 2 == 0} for number, one in enumerate(report.queries)], 0, "")
    assert other.kappas()["contains and rank 1"] < 1.0


def test_what_a_server_does_not_show_is_missing_and_never_zero(tmp_path):
    report = by_hand(tmp_path, RIGHTS, rank=None, logprobs=None, survival=None, survival_told=None, survival_heads=None, tally=None)
    (row,) = (row for row in report.rows if (row["policy"], row["turn"]) == ("h2o", "all"))
    assert {row[name] for name in ("accuracy_rank", "rank", "survival", "survival_told", "held", "read")} == {None}
    assert report.kappas() == {"contains and fuzzy": 1.0, "contains and rank 1": None, "fuzzy and rank 1": None}
    text = told(report).text("md")
    assert "50 % / 50 % / -" in {line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| h2o")}
    assert "what of the fact is held" not in text
    assert "held / read" not in text


# Many comparisons


def test_p_is_adjusted_over_all_policies_and_buckets_and_apart_over_the_turns(report):
    for together in (True, False):
        family = [row for row in report.rows if (row["turn"] == "all") == together and row["policy"] in ("h2o", "random")]
        assert len(family) == len(BUCKETS) * 2 * (1 if together else len(TURNS))
        expected = stats.holm([row["p"] for row in family])
        assert [row["p_holm"] for row in family] == pytest.approx(expected.tolist())
        assert [row["significant"] for row in family] == [p < 0.05 for p in expected]


def test_full_and_the_control_are_no_hypotheses(report):
    assert {(row["p_holm"], row["significant"]) for row in report.rows if row["policy"] in ("full", "control")} == {(None, None)}
    assert all(row["p"] is not None for row in report.rows if row["policy"] == "control")


def test_an_undefined_p_counts_in_no_family():
    rows = [{"verdict": "worse", "p": 0.02}, {"verdict": "inconclusive", "p": None}, {"verdict": None, "p": 0.001}]
    adjust(rows)
    assert rows[0] == {"verdict": "worse", "p": 0.02, "p_holm": 0.02, "significant": True}
    assert (rows[1]["p_holm"], rows[1]["significant"]) == (None, False)
    assert "p_holm" not in rows[2]


def test_the_asterisk_is_the_adjusted_p_s(report):
    told = [(accuracy(row).text, row) for row in report.rows if row["significant"] is not None]
    assert all(("*" in text) == row["significant"] for text, row in told)
    assert {row["significant"] for _, row in told if row["p"] < stats.LEVEL} == {True, False}


# Conversations that hang together


def made_of(*sources: str) -> list[dict]:
    """Conversations as a manifest has them, one for each word: the letters are what it is made of."""
    return [{"id": f"{number}", "sources": list(parts), "fact": f"f{number}"} for number, parts in enumerate(sources)]


LONERS = "mnopqrstuvwx"


def test_conversations_with_a_part_in_common_are_one_cluster_even_by_way_of_others():
    found = clusters(made_of("ab", "cd", "bc", "e", *LONERS))
    assert found.whole and found.groups == 2 + len(LONERS)
    assert found.of["0"] == found.of["1"] == found.of["2"]
    assert len(set(found.of.values())) == found.groups


def test_a_conversation_taken_whole_hangs_together_with_one_that_it_was_joined_into():
    found = clusters(made_of("a", "ba", "c", *LONERS))
    assert found.of["0"] == found.of["1"] != found.of["2"]


def test_conversations_told_the_same_fact_hang_together():
    made = made_of("a", "b", "c", *LONERS)
    found = clusters([made[0], {**made[1], "fact": made[0]["fact"]}, *made[2:]])
    assert found.of["0"] == found.of["1"] != found.of["2"]


def test_where_too_few_groups_are_left_each_conversation_stands_for_itself_and_that_is_said():
    chain = [f"{one}{other}" for one, other in zip("abcdefghijklmno", "bcdefghijklmnop", strict=True)]
    found = clusters(made_of(*chain, chain[0]))
    assert not found.whole and found.groups == 1
    assert len(set(found.of.values())) == len(chain) and found.of["0"] == found.of["15"]


def test_few_conversations_that_share_nothing_are_as_many_clusters():
    found = clusters(made_of(*LONERS[: LEAST - 2]))
    assert found.whole and len(set(found.of.values())) == LEAST - 2


ALL_RIGHT = [(True, True)] * 60  # 30 clusters: no flip among them is within 20 points


def verdicts(report: Report) -> dict:
    return {row["policy"]: row["verdict"] for row in report.rows if row["turn"] == "all"}


def test_a_cell_that_seldom_acted_is_never_ok(tmp_path):
    acted = by_hand(tmp_path / "a", {"full@100%": ALL_RIGHT, "h2o@30%": ALL_RIGHT})
    idle = by_hand(tmp_path / "b", {"full@100%": ALL_RIGHT, "h2o@30%": ALL_RIGHT}, tally=[1.0] * 9)
    assert verdicts(acted) == {"full": None, "h2o": "ok"} and verdicts(idle) == {"full": None, "h2o": "inconclusive"}


def test_a_cell_that_asks_for_everything_is_the_full_cache_and_no_hypothesis(tmp_path):
    report = by_hand(tmp_path, {"full@100%": RIGHTS["full@100%"], "h2o@100%": RIGHTS["full@100%"]}, tally=[1.0] * 9, budget="100%")
    row = next(row for row in report.rows if (row["policy"], row["turn"]) == ("h2o", "all"))
    assert (row["verdict"], row["p"], row["p_holm"], row["significant"]) == ("ok", None, None, False)


def test_where_intervals_may_be_too_narrow_nothing_is_ok(tmp_path):
    report = by_hand(tmp_path, {"full@100%": ALL_RIGHT, "h2o@30%": ALL_RIGHT})
    (found,) = report.clusters.values()
    narrow = replace(report)
    narrow.__dict__["clusters"] = {"1k-2k": found._replace(whole=False)}
    assert verdicts(narrow)["h2o"] == "inconclusive"


def test_a_quantised_cache_shows_its_bytes(tmp_path):
    report = by_hand(tmp_path, RIGHTS, tally=[10.0, 10.0, 4.0, 16.0, 8.0, 8.0, 0.0, 0.0, 1.0])
    (row,) = (row for row in report.rows if (row["policy"], row["turn"]) == ("h2o", "all"))
    assert (row["held"], row["held_bytes"], row["acted"]) == (1.0, 0.25, 1.0)
    assert "100 % / 100 % / 25 %" in told(report).text("md")


def test_what_generated_replies_did_to_queries_is_said(tmp_path):
    report = by_hand(tmp_path, RIGHTS)
    asked = {**report.manifest, "protocol": {**report.manifest["protocol"], "replies": "generate"}}
    again = [{**query, "restated": query["policy"] == "full" and query["turn"] == 2} for query in report.queries]
    assert report.notes == []
    left = [query for query in again if (query["policy"], query["turn"]) != ("h2o", 2)]
    short, h2o = replace(report, manifest=asked, queries=left), report.cells[1]
    restated, unasked = short.notes
    assert restated.startswith("full, 1k-2k: before 4 of 8 queries the model had said the answer itself in a reply.")
    assert unasked.startswith("h2o 30 %, 1k-2k: 4 of 8 queries were not asked, as replies had used up the model's positions.")
    assert len(short.pairs(h2o, "1k-2k", "all")) == 4
    assert not any("not asked" in note for note in replace(short, missing=1).notes)


def test_a_buckets_line_tells_the_context_that_queries_met(report):
    assert "A query met 400 tokens on average." in told(report).text("md")


def test_a_bucket_whose_conversations_all_hang_together_has_a_note(report):
    first, second = (bucket["note"] for bucket in report.as_dict()["buckets"])
    assert first is None
    assert second.startswith("2k-4k: by parts and facts in common the conversations fall into 1 group, too few")
    assert second in told(report).text("md")


# Words and files


@pytest.mark.parametrize("kind", ["md", "csv", "json", "latex"])
def test_a_run_is_told_in_every_format(report, kind):
    text = told(report).text(kind)
    assert "random" in text and "control" in text
    assert SAYS not in text


def test_the_run_s_own_table_has_every_row_with_the_adjusted_p(folder, report):
    rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    assert len(rows) == len(report.rows) == 4 * len(BUCKETS) * (1 + len(TURNS))
    names = "policy,budget,bucket,turn,n,correct,accuracy,low,high,difference,difference_low,difference_high,lost,gained,p,p_holm"
    assert ",".join(rows[0]).startswith(names)
    assert all(math.isclose(float(row["accuracy"]), ours["accuracy"]) for row, ours in zip(rows, report.rows, strict=True))


def test_json_says_what_the_conversations_are_made_of(report):
    value = json.loads(told(report).text("json"))
    assert [bucket["making"] for bucket in value["buckets"]] == [{"whole": 14}, {"joined": 14}]
    assert [(cell["label"], cell["full"], cell["control"]) for cell in value["cells"]] == [
        ("full", True, False), ("control", False, True), ("h2o 30 %", False, False), ("random 30 %", False, False)
    ]  # fmt: skip
    assert value["kind"] == "retention" and value["aside"]["command"].startswith("evalkit")


def test_the_recall_model_is_called_an_instrument_and_another_is_not(report, tmp_path):
    assert "test instrument" in told(report).text("md")
    assert "test instrument" not in told(by_hand(tmp_path, RIGHTS)).text("md")


def test_the_command_writes_a_folder_without_any_answer(folder, tmp_path, command):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    code, out, err = command("report", folder, "--format", "md", "--out", tmp_path / "out")
    assert code == 0
    names = [f"report.{kind}" for kind in ("md", "csv", "json")]
    names += [f"{name}-recall.{kind}" for name in ("buckets", "turns", "survival") for kind in ("png", "svg")]
    assert err.splitlines() == [str(tmp_path / "out" / name) for name in names]
    assert (tmp_path / "out" / "report.md").read_text() == out
    assert not any(SAYS.encode() in path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_the_command_writes_a_page(folder, tmp_path, command):
    code, _, err = command("report", folder, "--format", "csv", "--html", tmp_path / "page.html")
    assert (code, err) == (0, f"{tmp_path / 'page.html'}\n")
    assert "Retention, recall" in (tmp_path / "page.html").read_text()


def test_to_show_text_without_a_page_is_refused_in_a_line(folder, command):
    code, out, err = command("report", folder, "--show-text")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--show-text says what a page shows: give --html FILE too" in err


def test_a_sweep_s_folder_is_no_retention_run(tmp_path):
    Store.create(tmp_path, {"shown": {}})
    assert opened(tmp_path) is None
    with pytest.raises(UsageError, match="holds no retention run"):
        Records.open(tmp_path)
