"""Retention tests of chat servers: what is sent and recorded, and that a run goes on when either side was killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from threading import Barrier, Thread

import pytest

from evalkit.errors import UsageError
from evalkit.retention import client
from evalkit.retention.endpoint import LETTERS, SERVERS, Estimate, Threads, job
from evalkit.retention.facts import load
from evalkit.retention.records import Records
from tests.chatter import GO_ON, UNTOLD, Handler, chatting, status
from tests.saved import save
from tests.test_retention_chat import TURNED

FLAGS = {"model": "m", "bucket": "1k-2k", "turns": "2,4", "conversations": "3", "concurrency": 2, "patience": 60.0}
FACTS = load()
QUESTIONS = {question for fact in FACTS for question in fact.questions}


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch):
    for name in ("EVALKIT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "FIRST", 0.05)


def asked(url, folder, **given):
    """The test that the command line asks for; what is not given was left out."""
    names = (
        *SERVERS,
        "protocol",
        "jobs",
        "policy",
        "budget",
        "dtype",
        "together",
        "prefill_chunk",
        "model",
        "bucket",
        "turns",
        "conversations",
    )
    return job({**dict.fromkeys(names), **FLAGS, "endpoint": url, "out": folder, **given})


def run(url, folder, **given):
    """Run it; return the records of its queries."""
    asked(url, folder, **given).run()
    return queries(folder)


def queries(folder):
    """A run's queries, but for the seconds that they took."""
    lines = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run: its folder, its queries, and the messages of each request."""
    folder = tmp_path_factory.mktemp("served")
    with chatting() as chatter:
        found = run(chatter.url, folder)
    return folder, found, [body["messages"] for body in chatter.asked]


# What is recorded


def test_a_server_that_remembers_all_is_right_and_its_control_is_not(done):
    _, found, _ = done
    assert len(found) == 3 * 2 * 2
    for query in found:
        assert query["policy"] == ("control" if query["control"] else "endpoint")
        assert query["contains"] is query["fuzzy"] is not query["control"]
        assert query["answer"] == UNTOLD if query["control"] else query["answer"].startswith("It is ")


def test_what_a_server_does_not_show_is_missing_and_not_zero(done):
    names = ("budget", "rank", "logprobs", "survival", "survival_told", "survival_heads", "tally", "held", "read")
    assert all(query[name] is None for query in done[1] for name in names)


def test_the_server_s_own_count_is_the_context_s(done):
    _, found, sent = done
    assert {query["counted"] for query in found} == {"server"}
    assert Counter(query["context_tokens"] for query in found) == Counter(
        sum(10 + len(one["content"]) for one in messages) for messages in sent
    )


def test_without_a_count_and_a_tokenizer_lengths_are_an_estimate_that_says_so(tmp_path):
    with chatting(usage=False) as chatter:
        found = run(chatter.url, tmp_path)
    assert {query["counted"] for query in found} == {"estimate"}
    last = [query for query in found if query["turn"] == 4 and not query["control"]]
    assert all(1024 <= query["context_tokens"] < 2048 for query in last)
    assert all(0 < query["distance_tokens"] < query["context_tokens"] for query in last)
    assert Records.open(tmp_path).manifest["model"]["lengths"] == "an estimate, 4 characters a token"


def test_with_a_tokenizer_lengths_are_in_its_tokens(tmp_path):
    folder = save(tmp_path / "bytes")
    with chatting(usage=False) as chatter:
        found = run(chatter.url, tmp_path / "run", tokenizer=str(folder), bucket="3000-8000")
    assert {query["counted"] for query in found} == {"tokenizer"}
    assert all(3000 <= query["context_tokens"] < 8000 for query in found if query["turn"] == 4 and not query["control"])
    assert Records.open(tmp_path / "run").manifest["model"]["lengths"] == "tokens of bytes"


@pytest.mark.parametrize("text", ["", "a", "four", "fours", "x" * 41])
def test_an_estimate_has_a_token_for_every_four_letters(text):
    found = Estimate()(text)
    assert len(found["input_ids"]) == -(-len(text) // LETTERS)
    assert "".join(text[low:high] for low, high in found["offset_mapping"]) == text


def test_the_cell_is_named_by_its_label(tmp_path):
    with chatting() as chatter:
        found = run(chatter.url, tmp_path, label="vllm, 8 bits", conversations="1")
    assert {query["policy"] for query in found} == {"vllm, 8 bits", "control"}
    assert Records.open(tmp_path).manifest["protocol"]["policies"] == [{"name": "vllm, 8 bits", "knobs": {}, "budgets": None}]


# What is sent


def test_roles_take_turns_and_a_question_is_sent_once_and_last(done):
    for messages in done[2]:
        assert [one["role"] for one in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
        assert [one["content"] in QUESTIONS for one in messages] == [False] * (len(messages) - 1) + [True]


def test_an_answer_is_never_sent_back(done):
    said = {query["answer"] for query in done[1]}
    assert not any(one["content"] in said for messages in done[2] for one in messages)


def test_replayed_conversations_are_sent_as_the_source_has_them(done):
    folder, _, sent = done
    with chatting() as chatter:
        test = asked(chatter.url, folder)
        chosen = test.loader(test.protocol)().scripts(test.protocol.buckets[0])
    for script in chosen:
        texts = [part.strip() for exchange in script.told(1, control=False)[: script.end(2) + 1] for part in exchange]
        assert texts in [[one["content"] for one in messages[:-1]] for messages in sent]


def test_generated_replies_are_the_server_s_own_but_for_the_fact_s(tmp_path):
    with chatting() as chatter:
        found = run(chatter.url, tmp_path, conversations="1", replies="generate", reply_cap="9", control="false", answer_cap="5")
    last = chatter.asked[-1]
    replies = [one["content"] for one in last["messages"] if one["role"] == "assistant"]
    (fact,) = {query["fact"] for query in found}
    assert replies[0] == next(one.acknowledgement for one in FACTS if one.id == fact)
    assert replies[1:] == [f"{GO_ON} {number}." for number in range(3, len(last["messages"]), 2)]
    for body in chatter.asked:
        assert body["max_tokens"] == (5 if body["messages"][-1]["content"] in QUESTIONS else 9)


def test_a_system_prompt_stands_first(tmp_path):
    with chatting() as chatter:
        run(chatter.url, tmp_path, conversations="1", system="Be short.")
    assert all(body["messages"][0] == {"role": "system", "content": "Be short."} for body in chatter.asked)
    assert all(len(body["messages"]) % 2 == 0 for body in chatter.asked)


def test_conversations_go_on_side_by_side(tmp_path):
    both = Barrier(2)

    def waiting(handler):
        both.wait(timeout=20)  # for another request, which only a second conversation sends
        handler.well()

    with chatting(*[waiting] * 12) as chatter:
        assert len(run(chatter.url, tmp_path)) == 12


def test_conversations_end_where_the_server_s_positions_do(tmp_path):
    models = [{"id": "m", "max_model_len": 1500}]
    with chatting(models=models) as chatter, pytest.raises(UsageError, match="does not fit the model's 1500 positions"):
        run(chatter.url, tmp_path)


# Failures and resumption


def test_faults_that_pass_leave_no_trace(done, tmp_path):
    with chatting(status(503), status(429, Retry_After="0"), status(500)) as chatter:
        assert run(chatter.url, tmp_path) == done[1]


def test_a_run_that_was_refused_midway_goes_on_with_what_is_left(done, tmp_path):
    with chatting(*[Handler.well] * 7, status(401)) as chatter:
        with pytest.raises(UsageError, match="wants a token"):
            run(chatter.url, tmp_path, concurrency=1)
        assert len(Records.open(tmp_path).missing()) == 3
        chatter.asked.clear()
        assert run(chatter.url, tmp_path) == done[1]
        assert len(chatter.asked) == 3 * 2


def test_what_others_are_at_when_one_is_refused_is_not_lost():
    together = Barrier(2)

    class Scorer:
        def score(self, pack):
            together.wait()
            if pack == 0:
                raise UsageError("refused")
            time.sleep(0.2)
            return pack

    scored = Threads(Scorer(), 2).scored([(number, number) for number in range(5)])
    assert next(scored) == (1, 1)
    with pytest.raises(UsageError, match="refused"):
        next(scored)


def test_another_server_is_another_run(tmp_path):
    with chatting() as one, chatting() as other:
        run(one.url, tmp_path, conversations="1")
        with pytest.raises(UsageError, match=r"holds another run \(model.endpoint: here "):
            run(other.url, tmp_path, conversations="1")


def test_a_run_that_is_killed_loses_what_was_in_flight_and_no_more(done, tmp_path):
    with chatting() as chatter:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in {**FLAGS, "concurrency": 1}.items()]
        command = [
            sys.executable,
            "-c",
            "from evalkit.cli import main; main()",
            "retention",
            f"--endpoint={chatter.url}",
            f"--out={tmp_path}",
            *words,
        ]

        def killing(handler):
            while len(list(tmp_path.glob("packs/**/*.jsonl"))) < 3:  # being written while the next is asked for
                time.sleep(0.01)
            os.kill(child.pid, signal.SIGKILL)

        chatter.faults.extend([*[Handler.well] * 7, killing])
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
            assert child.wait(timeout=120) == -signal.SIGKILL
        assert len(Records.open(tmp_path).missing()) == 3
        chatter.asked.clear()
        assert run(chatter.url, tmp_path) == done[1]
        assert len(chatter.asked) == 3 * 2


# A real model, served by a process that is killed

REAL = {"model": "tiny", "patience": 600.0, "bucket": "1500-2600", "turns": "1,2", "headroom": "100", "answer_cap": "4"}


@contextmanager
def serving(folder, port, fatal):
    """A process that serves a model and dies when it was asked so many times."""
    command = [sys.executable, "-m", "tests.serve", str(folder), str(port), str(fatal)]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_served_model_that_is_killed_and_started_anew_midway_gives_the_same_records(tmp_path):
    folder = save(tmp_path / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TURNED}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    given = {**REAL, "tokenizer": str(folder)}
    url, ends = f"http://127.0.0.1:{port}/v1", []

    def restart():
        with serving(folder, port, 12 + 5) as first:
            ends.append(first.wait(timeout=600))
        with serving(folder, port, 99) as second:
            over.wait(timeout=600)
            ends.append(second.poll())

    over = Barrier(2)
    thread = Thread(target=restart, daemon=True)
    thread.start()
    undisturbed = run(url, tmp_path / "undisturbed", **given)
    disturbed = run(url, tmp_path / "disturbed", **given)
    over.wait()
    thread.join()
    assert ends == [-signal.SIGKILL, None]
    assert len(undisturbed) == 12 and disturbed == undisturbed
    last = [query for query in undisturbed if query["turn"] == 2 and not query["control"]]
    assert all(query["counted"] == "server" and 1500 <= query["context_tokens"] < 2600 for query in last)
    assert len({query["answer"] for query in undisturbed}) > 1


# The command line


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"policy": "h2o", "budget": "0.1"}, "--policy, --budget cannot go with --endpoint"),
        ({"jobs": 2}, "--jobs cannot go with --endpoint"),
        ({"together": "4"}, "--together cannot go with --endpoint"),
        ({"model": None}, "--endpoint needs --model: give a name that http://localhost/v1/models lists"),
        ({"label": "Control"}, "--label 'Control' is no name for what is served"),
        ({"label": " "}, "--label '' is no name for what is served"),
        ({"label": "a\nb"}, "is no name for what is served: give a line of text"),
        ({"endpoint": None}, r"--concurrency, --patience says how a server is asked: give --endpoint"),
        ({"endpoint": "localhost"}, "--endpoint localhost is no chat server's address"),
        ({"bucket": "2k-1k"}, "give a range of tokens"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(given, told, tmp_path):
    with pytest.raises(UsageError, match=told) as error:
        asked("http://localhost/v1", tmp_path, **given)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_cannot_be_had_is_named(tmp_path):
    with (
        chatting() as chatter,
        pytest.raises(UsageError, match=r"tokenizer=.*none cannot be had \(.*\): give a folder or a hub name"),
    ):
        run(chatter.url, tmp_path / "run", tokenizer=str(tmp_path / "none"))


def test_no_secret_is_written_by_the_command(command, monkeypatch, tmp_path):
    words = [f"--{name}={value}" for name, value in {**FLAGS, "conversations": 1}.items()]
    with chatting(status(503, "sk-token-of-mine")) as chatter:
        monkeypatch.setenv("EVALKIT_API_KEY", "sk-token-of-mine")
        first = command("retention", "--endpoint", chatter.url, "--out", tmp_path / "a", *words)
        url = chatter.url.replace("//", "//me:geheimnis@")
        second = command("retention", f"--endpoint={url}", "--out", tmp_path / "b", *words)
    assert len(chatter.authorized) == 9 and first[0] == second[0] == 0
    texts = [*map(str, (*first, *second)), *(path.read_text() for path in tmp_path.rglob("*") if path.is_file())]
    assert not any(secret in text for text in texts for secret in ("sk-token-of-mine", "geheimnis"))
    assert "//***@127" in (tmp_path / "b" / "run.json").read_text()


def test_the_report_names_the_label_and_leaves_out_what_is_missing(command, tmp_path):
    words = [f"--{name}={value}" for name, value in {**FLAGS, "label": "served"}.items()]
    with chatting() as chatter:
        code, _, _ = command("retention", "--endpoint", chatter.url, "--out", tmp_path, *words)
    assert code == 0
    _, told, _ = command("report", tmp_path, "--format", "md")
    rows = [line for line in told.splitlines() if line.startswith("| served |")]
    assert rows[0].startswith("| served | 100") and "| served | 100 % / 100 % / - |" in rows
    assert "what of the fact is held" not in told and "held / read" not in told
    assert "an estimate, 4 characters a token" in told
    _, told, _ = command("report", tmp_path, "--format", "csv")
    first = dict(zip(*(line.split(",") for line in told.splitlines()[:2]), strict=True))
    assert (first["policy"], first["budget"], first["accuracy_rank"], first["survival"], first["held"]) == (
        "served",
        "",
        "",
        "",
        "",
    )
