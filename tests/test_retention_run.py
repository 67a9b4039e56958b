"""Retention runs: what is recorded, taken up again and refused."""

import json
import subprocess
import sys

import pytest

from evalkit.errors import UsageError
from evalkit.retention.protocol import load as protocol
from evalkit.retention.records import Records
from evalkit.retention.run import Retention, player
from evalkit.spread import Alone
from tests.saved import save
from tests.test_retention_chat import TURNED

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
    return [{name: value for name, value in line.items() if name not in ("seconds", "ttft", "tpot")} for line in lines]


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
    assert path.with_suffix(".damaged").is_file() and any("cut short" in line for line in said)
    assert queries(tmp_path) == queries(done)


def test_another_protocol_is_another_run(asked, scorer, done):
    other = asked.model_copy(update={"seed": 5})
    with pytest.raises(UsageError, match=r"holds another run \(protocol.seed: here 5, there 0\)"):
        retention(other, done, scorer).run()


def test_another_margin_is_the_same_run(asked, scorer, done):
    retention(asked.model_copy(update={"margin": 7.0}), done, scorer, stop_after=0).run()
    assert Records.open(done).manifest["shown"]["margin"] == 7.0


def test_what_a_policy_refuses_is_said_before_a_model_is_loaded(asked, tmp_path):
    wrong = protocol(given={**FLAGS, "policy": "h2o(every=1)"})
    with pytest.raises(UsageError, match="h2o has no knob 'every'"):
        Retention(wrong, tmp_path).run()


def test_what_loads_models_is_imported_where_it_works():
    asks = "import sys; from evalkit.retention.run import player; player(None); sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asks]).returncode == 0
