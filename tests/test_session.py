"""Sessions: what is taken in and what waits, what is said and scored, and how conversations go on."""

import pytest
import torch

from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.model import tiny as llama
from evalkit.policies import build
from evalkit.session import Engine
from tests import tiny

MODEL = llama(1)
LAYERS, HEADS = 3, 2
SOME = [("full", "prompt"), ("h2o", "prompt"), ("h2o:paper", "prompt"), ("streaming_llm", "prompt"), ("quest", "prompt")]
STREAMED = [("h2o", "stream"), ("tova", "stream"), ("quest", "stream")]
tokens = tiny.tokens


def engine(**settings):
    return Engine(MODEL, **settings)


def opened(name="h2o", protocol="prompt", budget="30%", **settings):
    return engine(**settings).open(build(name, budget), protocol)


def never(said):
    return False


def logprobs(scores):
    return [score.logprob for score in scores]


def same(one, other):
    """Whether two sessions hold the same entries and say the same."""
    assert one.seen == other.seen
    for mine, theirs in zip(one.caches, other.caches, strict=True):
        for b in range(mine.positions.shape[1]):
            kept, others = mine.filled[0, b], theirs.filled[0, b]
            assert mine.positions[0, b][kept].tolist() == theirs.positions[0, b][others].tolist()
            for side, other_side in zip(mine.entries.dense(), theirs.entries.dense(), strict=True):
                torch.testing.assert_close(side[0, b][kept], other_side[0, b][others], rtol=0, atol=1e-9)
    asked = [tokens(3, 98), tokens(1, 99)]
    assert logprobs(one.score(asked)) == pytest.approx(logprobs(other.score(asked)), abs=1e-9)


# The waiting token


def test_the_newest_token_waits():
    session = opened()
    session.feed(tokens(20))
    assert (session.seen, session.waiting) == (19, tokens(20)[-1:])
    assert [int(held.seen) for held in session.caches] == [19] * LAYERS
    session.feed(tokens(5, 1))
    assert (session.seen, session.waiting) == (24, tokens(5, 1)[-1:])


def test_a_prompt_of_one_token_takes_in_nothing():
    session = opened()
    session.feed(tokens(1))
    assert (session.seen, session.waiting, session.caches) == (0, tokens(1), [])


def test_a_session_cannot_start_from_nothing():
    with pytest.raises(UsageError, match="a session cannot start from no tokens: feed it one or more"):
        opened().feed([])


def test_nothing_more_changes_nothing():
    session = opened()
    session.feed(tokens(20))
    before = session.caches
    session.feed([])
    assert (session.seen, session.waiting) == (19, tokens(20)[-1:])
    assert session.caches == before


# Scoring and saying


@pytest.mark.parametrize(("name", "protocol"), SOME + STREAMED)
@pytest.mark.parametrize("length", [1, 2, 33])
def test_a_session_scores_what_a_document_scores(name, protocol, length):
    document = Document(tokens(length, length), (tokens(1, 2), tokens(6, 3), tokens(6, 3)[:4] + tokens(2, 4)))
    policy = build(name, "30%")
    scored = engine().score([document], [policy], protocol)[0].scores[0]
    session = engine().open(policy, protocol)
    session.feed(document.prompt)
    assert logprobs(session.score(document.answers)) == pytest.approx(logprobs(scored), abs=1e-9)


@pytest.mark.parametrize(("name", "protocol"), SOME + STREAMED)
@pytest.mark.parametrize("length", [1, 33])
def test_what_a_session_says_is_what_it_scores_as_greedy(name, protocol, length):
    session = opened(name, protocol)
    session.feed(tokens(length, length))
    before = session.fork()
    said = session.generate(6, never)
    other = [*said[:5], (said[5] + 1) % tiny.VOCABULARY]
    assert [score.greedy for score in before.score([said, other])] == [True, False]


def test_scoring_leaves_the_session_as_it_was():
    session = opened("h2o:paper")
    session.feed(tokens(20))
    held, asked = session.caches, [tokens(4, 1), tokens(1, 2)]
    first = session.score(asked)
    assert session.caches == held
    assert (session.seen, session.waiting) == (19, tokens(20)[-1:])
    assert session.score(asked) == first


def test_saying_ends_at_the_limit_or_where_stop_says():
    session = opened()
    session.feed(tokens(12))
    whole = session.fork().generate(7, never)
    assert len(whole) == 7
    assert session.generate(7, lambda said: said[-1] == whole[2]) == whole[: whole.index(whole[2]) + 1]
    assert session.waiting == (whole[2],)


def test_another_choice_than_the_likeliest_is_taken():
    session = opened()
    session.feed(tokens(12))
    least = session.generate(3, never, lambda logits: int(logits.argmin()))
    likely = opened()
    likely.feed(tokens(12))
    assert least != likely.generate(3, never)
    assert session.waiting == (least[-1],)


def test_forks_go_on_by_themselves():
    session = opened("h2o:paper")
    session.feed(tokens(20))
    one, other = session.fork(), session.fork()
    one.feed(tokens(9, 1))
    other.feed(tokens(4, 2))
    assert (session.seen, one.seen, other.seen) == (19, 28, 23)
    again = session.fork()
    again.feed(tokens(9, 1))
    same(one, again)


# Conversations


def test_messages_under_the_full_cache_are_one_long_prompt():
    parted, whole = opened("full"), opened("full")
    for start, stop in ((0, 10), (10, 11), (11, 40)):
        parted.feed(tokens(40)[start:stop])
    whole.feed(tokens(40))
    same(parted, whole)


def test_the_budget_is_granted_anew_for_each_message():
    session = opened("h2o", budget="50%")
    for count, seen in ((21, 20), (10, 30), (1, 31)):
        session.feed(tokens(count, count))
        assert [held.counts.tolist() for held in session.caches] == [[[seen // 2] * HEADS]] * LAYERS


@pytest.mark.parametrize(("name", "protocol"), SOME + STREAMED)
def test_a_replayed_reply_leaves_what_a_generated_one_leaves(name, protocol):
    generated, replayed = opened(name, protocol), opened(name, protocol)
    generated.feed(tokens(30))
    replayed.feed(tokens(30))
    said = generated.generate(7, never)
    replayed.feed(said, decoded=True)
    generated.feed(tokens(9, 1))
    replayed.feed(tokens(9, 1))
    same(generated, replayed)


@pytest.mark.parametrize("length", [1, 8])
def test_a_reply_goes_on_under_the_budget_before_it_and_ends_under_a_new_one(length):
    session = opened("h2o:paper", budget="50%")
    session.feed(tokens(21))
    session.generate(length, never)
    assert [held.counts.tolist() for held in session.caches] == [[[10] * HEADS]] * LAYERS
    session.conclude()
    assert [int(held.allowance) for held in session.caches] == [(20 + length) // 2] * LAYERS


def test_a_reply_is_taken_in_token_by_token():
    """Its tokens meet the policy, those of a message attend to all that is held."""
    replied, told = opened("streaming_llm", budget=6), opened("streaming_llm", budget=6)
    for session, decoded in ((replied, True), (told, False)):
        session.feed(tokens(20))
        session.feed(tokens(9, 1), decoded=decoded)
    deep = [session.caches[-1].entries.dense()[0][..., -1, :] for session in (replied, told)]
    assert (deep[0] - deep[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv", "streaming_llm", "tova", "quest"])
def test_messages_in_chunks_leave_what_whole_ones_leave(name):
    knobs = {"window": 6} if name == "snapkv" else {}
    whole, parted = (engine(prefill_chunk=size).open(build(name, "30%", **knobs)) for size in (4096, 8))
    for session in (whole, parted):
        session.feed(tokens(50))
        session.generate(2, never)
        session.feed(tokens(37, 1))
    same(whole, parted)
