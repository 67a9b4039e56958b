"""Sessions side by side: each holds and says what it would alone."""

from dataclasses import replace

import pytest
import torch

from evalkit.counters import Counters, Tally
from evalkit.group import Group
from evalkit.model import tiny as llama
from evalkit.policies import build
from evalkit.session import Engine
from tests import tiny
from tests.test_session import never, same, tokens

MODEL = llama(1)
POLICIES = {
    "full": {}, "h2o": {}, "h2o:paper": {}, "snapkv": {"window": 6}, "streaming_llm": {}, "tova": {}, "knorm": {}, "random": {},
    "quest": {"dense_layers": 1, "page": 4}, "infinigen": {"dense_layers": 1, "alpha": 1.0}, "kivi": {"group": 4},
}  # fmt: skip
LENGTHS = ((20, 33, 26), (7, 12, 2), (5, 9, 16), (3, 2, 8), (6, 6, 4))  # of each session's messages: asked, replied, asked ...


def engine(model=MODEL):
    return Engine(model, calibration=lambda: tokens(tiny.VOCABULARY - 3, 999))


def policy(name, budget="30%"):
    return build(name, "70%" if name == "kivi" else budget, **POLICIES.get(name, {}))


def messages(place):
    return [tokens(lengths[place], 10 * turn + place) for turn, lengths in enumerate(LENGTHS)]


def group(name, sessions=3, model=MODEL):
    shared = engine(model)
    return Group(shared, [shared.open(policy(name)) for _ in range(sessions)])


@pytest.mark.parametrize("name", POLICIES)
def test_conversations_side_by_side_are_what_each_is_alone(name):
    together = group(name)
    alone = [engine().open(policy(name)) for _ in range(3)]
    for turn in range(len(LENGTHS)):
        together.feed([messages(place)[turn] for place in range(3)], decoded=turn % 2 == 1)
        for place, session in enumerate(alone):
            session.feed(messages(place)[turn], decoded=turn % 2 == 1)
            same(together.sessions[place], session)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_said_and_scored_side_by_side_is_what_each_would_alone(name):
    together = group(name)
    alone = [engine().open(policy(name)) for _ in range(3)]
    together.feed([messages(place)[0] for place in range(3)])
    asked = [[tokens(3, place), tokens(1, 50), tokens(3, place)[:2] + tokens(2, 70)] for place in range(3)]
    scores = together.score(asked)
    stop = lambda said: len(said) > 2 and said[-1] % 3 == 0  # noqa: E731
    said = together.generate(9, stop)
    together.feed([tokens(4, 7)] * 3)
    for place, session in enumerate(alone):
        session.feed(messages(place)[0])
        expected = [score.logprob for score in session.score(asked[place])]
        assert [score.logprob for score in scores[place]] == pytest.approx(expected, abs=1e-9)
        assert session.generate(9, stop) == said[place]
        session.feed(tokens(4, 7))
        same(together.sessions[place], session)


CHOICES = [
    *[(name, "llama", "prompt") for name in POLICIES],
    *[(name, "llama", "stream") for name in ("full", "h2o:paper", "tova")],
    ("full", "mistral", "prompt"), ("quest", "mistral", "prompt"), ("h2o", "gemma2", "prompt"), ("infinigen", "gpt_oss", "prompt"),
    ("full", "opt", "prompt"),
]  # fmt: skip


def ending(*lengths):
    """A stop for sequences said side by side: one ends at each of these lengths."""
    left = list(lengths)
    return lambda said: len(said) in left and left.remove(len(said)) is None


def forks(together):
    """Forks whose costs are counted by themselves, and counters for them."""
    together.engine.counters = Counters()
    group = Group(together.engine, [session.fork() for session in together.sessions])
    for fork in group.sessions:
        fork.cell = replace(fork.cell, tally=Tally(1, torch.device("cpu")))
    return group, together.engine.counters


@pytest.mark.parametrize(("name", "family", "protocol"), CHOICES)
def test_answers_are_what_would_be_said_and_leave_sessions_as_they_are(name, family, protocol):
    model, lengths, ends = tiny.model(family), (20, 33, 26, 5), (2, 5, 8, 9)
    shared = engine(model)
    together = Group(shared, [shared.open(policy(name), protocol) for _ in lengths])
    together.feed([tokens(length, length) for length in lengths])
    (asked, counters), (going_on, others) = forks(together), forks(together)
    shared.counters = counters
    said = asked.answer(9, ending(*ends))
    shared.counters = others
    assert said == going_on.generate(9, ending(*ends))
    assert sorted(map(len, said)) == list(ends)
    for count in (lambda one: one.tokens["decoded"], lambda one: len(one.firsts), lambda one: len(one.steps)):
        assert count(counters) == count(others)
    for length, session, fork, other in zip(lengths, together.sessions, asked.sessions, going_on.sessions, strict=True):
        torch.testing.assert_close(fork.cell.tally.totals(), other.cell.tally.totals())
        assert (fork.said, fork.fed) == (session.said, session.fed)
        alone = engine(model).open(policy(name), protocol)
        alone.feed(tokens(length, length))
        same(fork, alone)


def test_a_sequence_that_has_ended_needs_no_further_position():
    room = 40
    shared = engine(tiny.model("opt", max_position_embeddings=room))
    together = Group(shared, [shared.open(policy("full")) for _ in range(3)])
    together.feed([tokens(length, length) for length in (room - 2, 7, 9)])
    assert together.sessions[0].seen + 3 == room
    said = together.answer(9, ending(3))
    assert [*map(len, said)] == [3, 9, 9]
    assert said == together.generate(9, ending(3))


@pytest.mark.parametrize("name", POLICIES)
def test_a_reply_taken_in_at_once_leaves_what_one_taken_in_by_steps_leaves(name):
    at_once, stepping = engine().open(policy(name)), engine().open(policy(name))
    for session in (at_once, stepping):
        session.feed(tokens(40))
    at_once.feed(tokens(9, 1), decoded=True)
    ready, end = (*stepping.waiting, *tokens(9, 1)[:-1]), 48
    for part, basis, completes in ((ready[:-1], None, len(ready) - 1), (ready[-1:], end, 0)):
        stepping.step(part, basis, completes)
        stepping.seen += len(part)
    stepping.waiting = tokens(9, 1)[-1:]
    same(at_once, stepping)


def test_only_policies_that_leave_replies_alone_or_whose_queries_choose_take_them_in_at_once():
    able = {name for name in POLICIES if policy(name).replies_at_once}
    assert able == {"full", "h2o", "snapkv", "knorm", "random", "infinigen"}


def test_models_whose_rotation_hangs_on_the_length_go_one_by_one():
    model = tiny.model("llama dynamic")
    together, alone = group("h2o", 2, model), [engine(model).open(policy("h2o")) for _ in range(2)]
    together.feed([tokens(9, 1), tokens(14, 2)])
    together.feed([tokens(5, 3), tokens(3, 4)], decoded=True)
    said = together.generate(3, never)
    for place, session in enumerate(alone):
        session.feed((tokens(9, 1), tokens(14, 2))[place])
        session.feed((tokens(5, 3), tokens(3, 4))[place], decoded=True)
        assert session.generate(3, never) == said[place]


def test_a_message_longer_than_a_block_arrives_in_several_rows():
    shared = Engine(MODEL, prefill_chunk=8)
    together = Group(shared, [shared.open(policy("h2o")) for _ in range(2)])
    together.feed([tokens(30), tokens(5, 1)])
    together.feed([tokens(3, 2), tokens(21, 3)])
    for place, told in enumerate(([tokens(30), tokens(3, 2)], [tokens(5, 1), tokens(21, 3)])):
        session = engine().open(policy("h2o"))
        for message in told:
            session.feed(message)
        same(together.sessions[place], session)


def test_rows_are_shared():
    together, rows = group("streaming_llm"), []
    run = together.engine.run
    together.engine.run = lambda packing, *given: (rows.append(len(packing.tokens)), run(packing, *given))[1]
    for turn in range(2):
        together.feed([messages(place)[turn] for place in range(3)], decoded=turn == 1)
    assert rows == [sum(LENGTHS[0]) - 3, sum(LENGTHS[1])]


def test_held_entries_are_not_padded_by_others():
    together = group("quest")
    for turn in range(4):
        together.feed([messages(place)[turn] for place in range(3)], decoded=turn % 2 == 1)
    for session in together.sessions:
        assert all(cache.slots == session.seen and not cache.gaps for cache in session.caches)
        assert all(torch.equal(cache.positions[0, 0], torch.arange(session.seen)) for cache in session.caches)
