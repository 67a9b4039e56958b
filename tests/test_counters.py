"""Counters: what is counted where it happens, what was not counted is missing, and counting changes nothing."""

import pytest
import torch

from evalkit.counters import Counters
from evalkit.footprint import Footprint
from evalkit.group import Group
from evalkit.ledger import Record
from evalkit.model import tiny
from evalkit.pace import pace, spread
from evalkit.policies import build
from evalkit.session import Engine
from tests.tiny import tokens

MODEL = tiny(1)


def never(said):
    return False


def generated(count, sessions=1, name="h2o"):
    engine = Engine(MODEL)
    group = Group(engine, [engine.open(build(name, "20%" if name != "full" else None)) for _ in range(sessions)])
    group.feed([tokens(30 + place, place) for place in range(sessions)])
    said = group.generate(count, never)
    return engine.counters, said


def test_the_first_token_takes_the_prompt_and_a_step_the_others_a_step_each():
    counters, _ = generated(5)
    assert len(counters.firsts) == 1
    assert len(counters.steps) == 4
    first_step = counters.seconds["decode"] - sum(counters.steps)
    assert counters.firsts[0] == pytest.approx(counters.seconds["prefill"] + first_step)
    assert counters.tokens["decoded"] == 5


def test_every_sequence_side_by_side_has_a_first_token_and_a_step_counts_once():
    counters, _ = generated(3, sessions=4)
    assert len(counters.firsts) == 4
    assert len(set(counters.firsts)) == 1  # they came in one row
    assert len(counters.steps) == 2
    assert counters.tokens["decoded"] == 12


def test_a_session_alone_counts_as_one_in_a_group():
    engine = Engine(MODEL)
    session = engine.open(build("full"))
    session.feed(tokens(30))
    session.generate(3, never)
    assert (len(engine.counters.firsts), len(engine.counters.steps)) == (1, 2)


def test_an_answer_that_goes_on_without_a_message_has_no_first_token():
    engine = Engine(MODEL)
    session = engine.open(build("full"))
    session.feed(tokens(30))
    session.generate(2, never)
    session.generate(2, never)
    assert (len(engine.counters.firsts), len(engine.counters.steps)) == (1, 3)


def test_a_replayed_reply_is_no_prompt():
    engine = Engine(MODEL)
    session = engine.open(build("h2o", "30%"))
    session.feed(tokens(30))
    before = engine.counters.seconds["prefill"]
    session.feed(tokens(5, 1), decoded=True)
    assert engine.counters.seconds["prefill"] == before
    assert engine.counters.seconds["replay"] > 0
    session.generate(1, never)
    assert engine.counters.firsts == []


def test_policy_and_attention_are_parts_of_the_forward_pass():
    counters, _ = generated(4)
    assert 0 < counters.seconds["policy"] + counters.seconds["attention"] < counters.seconds["forward"]
    assert counters.seconds["forward"] < counters.seconds["prefill"] + counters.seconds["decode"]


def test_what_was_not_counted_is_not_there():
    assert spread([]) == {}
    assert pace([], [], {}, 0, 0) == {}
    assert pace([], [], {"forward": 1.0}, 10, 0) == {"model_seconds": 1.0}


def test_a_pace_is_read_off_seconds():
    found = pace([1.0, 3.0], [0.1] * 99 + [1.1], {"prefill": 2.0, "decode": 4.0, "forward": 5.0, "policy": 1.5}, 100, 8)
    assert found["ttft"] == {"mean": 2.0, "p50": 2.0, "p99": pytest.approx(2.98)}
    assert found["tpot"]["p50"] == pytest.approx(0.1)
    assert found["tpot"]["mean"] == pytest.approx(0.11)
    assert (found["prefill_tokens_per_second"], found["decode_tokens_per_second"], found["model_seconds"]) == (50.0, 2.0, 3.5)


def test_a_record_of_scores_has_no_time_to_first_token():
    record = Record()
    record.spent(Counters(seconds={"forward": 1.0}))
    assert "ttft" not in record.as_dict()["pace"]


def test_a_record_of_generated_texts_tells_their_pace():
    record, (counters, _) = Record(prompt_tokens=30), generated(5)
    record.spent(counters)
    record.spent(counters)
    found = record.as_dict()["pace"]
    assert found["ttft"]["mean"] == pytest.approx(counters.firsts[0])
    assert found["tpot"]["mean"] == pytest.approx(sum(counters.steps) / 4)
    assert found["decode_tokens_per_second"] == pytest.approx(5 / counters.seconds["decode"])
    assert not {"firsts", "steps", "decoded"} & set(record.as_dict())


def test_a_footprint_sees_what_a_stretch_of_work_takes_and_not_what_went_before():
    before = torch.ones(64 << 18)  # 64 MiB
    del before
    with Footprint(torch.device("cpu")) as small:
        torch.ones(1)
    with Footprint(torch.device("cpu")) as large:
        torch.ones(64 << 18)
    taken = [found["host_peak_bytes"] - found["host_start_bytes"] for found in (small.as_dict(), large.as_dict())]
    assert taken[0] < 8 << 20 < 48 << 20 < taken[1]
    assert "nvml_peak_bytes" not in large.as_dict()
    assert "device_peak_bytes" not in large.as_dict()
