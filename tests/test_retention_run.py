"""Retention runs: what is recorded, taken up again and refused, and what is made of it."""

import json

import pytest

from evalkit.errors import UsageError
from evalkit.retention.protocol import load as protocol
from evalkit.retention.records import Records
from evalkit.retention.report import Report, retained, told
from evalkit.retention.run import Retention, manifest, player
from evalkit.spread import Alone
from evalkit.store import Store
from tests.saved import save
from tests.test_retention_chat import TURNED
from tests.test_retention_scripts import script

FLAGS = {
    "policy": "full,h2o,snapkv", "bucket": "1500-2600", "turns": "1,2", "conversations": "3", "together": "2", "answer_cap": "2",
    "headroom": "100",
}  # fmt: skip


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A small test on a tiny model that knows bytes."""
    folder = save(tmp_path_factory.mktemp("model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TURNED}))
    return protocol(given={**FLAGS, "model": str(folder)})


@pytest.fixture(scope="module")
def scorer(asked):
    return player(asked)()


def retention(asked, folder, scorer, stop_after=None):
    """A run in this process by a scorer made before, which fails when it has walked so many packs."""
    from contextlib import contextmanager

    class Failing(Alone):
        def scored(self, packs):
            for number, found in enumerate(super().scored(packs)):
                if number == stop_after:
                    raise KeyboardInterrupt
                yield found

    @contextmanager
    def crew(make):
        yield Failing(scorer)

    return Retention(asked, folder, crew, say=lambda line: None)


@pytest.fixture(scope="module")
def done(asked, scorer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "whole"
    retention(asked, folder, scorer).run()
    return folder


def queries(folder):
    lines = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_every_cell_is_asked_after_every_turn_of_every_conversation(done):
    found = queries(done)
    assert len(found) == 4 * 3 * 2
    assert {(query["policy"], query["budget"], query["control"]) for query in found} == {
        ("full", "100%", False), ("control", "100%", True), ("h2o", "30%", False), ("snapkv", "30%", False),
    }  # fmt: skip
    wanted = {"policy", "budget", "bucket", "conversation", "turn", "fact", "context_tokens", "distance_tokens", "answer", "contains",
              "fuzzy", "rank", "survival", "held", "read"}  # fmt: skip
    assert all(wanted <= set(query) for query in found)


def test_all_cells_are_asked_the_same(done):
    by_cell = {}
    for query in queries(done):
        by_cell.setdefault(query["policy"], []).append([query[name] for name in ("conversation", "turn", "fact", "question")])
    assert all(asked == by_cell["full"] for asked in by_cell.values())


def test_the_last_query_s_context_lies_in_the_bucket(done):
    last = [query["context_tokens"] for query in queries(done) if query["turn"] == 2 and query["policy"] == "full"]
    assert all(1500 <= context < 2600 for context in last)


def test_a_run_that_was_stopped_ends_as_one_that_was_not(asked, scorer, done, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        retention(asked, tmp_path, scorer, stop_after=3).run()
    assert len(Records.open(tmp_path).missing()) == 5
    again = retention(asked, tmp_path, scorer)
    again.run()
    assert queries(tmp_path) == queries(done)


def test_a_finished_run_walks_nothing_more(asked, scorer, done):
    retention(asked, done, scorer, stop_after=0).run()


def test_a_damaged_pack_is_set_aside_and_walked_anew(asked, scorer, done, tmp_path):
    retention(asked, tmp_path, scorer).run()
    store = Records.open(tmp_path)
    path = store.names()[2].path(tmp_path)
    path.write_text(path.read_text()[:-40])
    said = []
    mending = retention(asked, tmp_path, scorer)
    mending.say = said.append
    mending.run()
    assert path.with_suffix(".damaged").is_file() and "cut short" in said[1]
    assert queries(tmp_path) == queries(done)


def test_another_protocol_is_another_run(asked, scorer, done):
    other = asked.model_copy(update={"seed": 5})
    with pytest.raises(UsageError, match=r"holds another run \(protocol.seed: here 5, there 0\)"):
        retention(other, done, scorer).run()


def test_another_margin_is_the_same_run(asked, scorer, done):
    retention(asked.model_copy(update={"margin": 7.0}), done, scorer, stop_after=0).run()
    assert Records.open(done).manifest["shown"]["margin"] == 7.0


def test_a_sweep_s_folder_is_no_retention_run(tmp_path):
    Store.create(tmp_path, {"shown": {}})
    assert retained(tmp_path) is None
    with pytest.raises(UsageError, match="holds no retention run"):
        Records.open(tmp_path)


def test_what_a_policy_refuses_is_said_before_a_model_is_loaded(asked, tmp_path):
    wrong = protocol(given={**FLAGS, "policy": "h2o(every=1)"})
    with pytest.raises(UsageError, match="h2o has no knob 'every'"):
        Retention(wrong, tmp_path).run()


@pytest.mark.parametrize("kind", ["md", "csv", "json", "latex"])
def test_a_run_is_told_in_every_format(done, kind):
    text = retained(done).text(kind)
    assert "snapkv" in text
    assert (done / "table.csv").read_text().startswith("policy,budget,bucket,turn,n,correct,accuracy,low,high,difference")


# By hand


def query(turn, right, survival=1.0, fuzzy=None, first=None):
    return {
        "turn": turn, "question": "?", "context_tokens": 100 * turn, "distance_tokens": 90 * turn, "answer": "x", "contains": right,
        "likeness": 50.0, "fuzzy": right if fuzzy is None else fuzzy, "rank": 1 if (right if first is None else first) else 3,
        "logprobs": [-1.0, -2.0], "survival": survival, "survival_told": survival, "survival_heads": [[survival]],
        "tally": [3.0, 10.0, 6.0, 20.0, 2.0, 8.0, 0.0, 0.0, 1.0], "seconds": 0.1,
    }  # fmt: skip


def by_hand(folder, rights, skip=0):
    """A run of two turns in which each cell's answers are given: label -> conversation -> turn -> right."""
    labels = list(rights)
    asked = protocol(given={"policy": ",".join(label.split("@")[0] for label in labels), "turns": "1,2", "bucket": "1k-2k",
                            "conversations": "5", "together": "1", "control": "false", "model": "m"})  # fmt: skip
    chosen = {"1k-2k": [script(2, 4 + number) for number in range(len(rights[labels[0]]))]}
    chosen["1k-2k"] = [
        type(one)(f"1k-2k/{i}", one.making, (f"c{i // 2}",), one.exchanges, 2, one.fact) for i, one in enumerate(chosen["1k-2k"])
    ]
    store = Records.create(folder, manifest(asked, {"digest": "0"}, chosen))
    names = store.names()
    for name in names[: len(names) - skip]:
        right = rights[store.cell_of(name)["label"]][name.number]
        store.record(name, [[query(turn + 1, one) for turn, one in enumerate(right)]], {"seconds": {}})
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
    from evalkit import stats

    row = next(row for row in by_hand(tmp_path, RIGHTS).rows if (row["policy"], row["turn"]) == ("h2o", "all"))
    full, other = ([int(one) for pair in RIGHTS[label] for one in pair] for label in RIGHTS)
    expected = stats.paired(full, other, ["c0"] * 4 + ["c1"] * 4)
    assert (row["difference_low"], row["difference_high"], row["p"]) == (expected.low, expected.high, expected.p)


def test_an_unfinished_run_says_so_and_pairs_what_is_there(tmp_path):
    report = by_hand(tmp_path, RIGHTS, skip=1)
    assert report.missing == 1
    assert {(row["policy"], row["n"]) for row in report.rows if row["turn"] == "all"} == {("full", 8), ("h2o", 6)}
    assert "Not finished: 1 packs" in told(report).text("md")


def test_scorers_that_differ_agree_less(tmp_path):
    report = by_hand(tmp_path, RIGHTS)
    assert report.kappas()["contains and fuzzy"] == 1.0
    other = Report(report.manifest, [{**one, "first": number % 2 == 0} for number, one in enumerate(report.queries)], 0, "")
    assert other.kappas()["contains and first"] < 1.0
