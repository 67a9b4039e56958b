"""Walks: what is asked on forks, what survives, and that nobody else has a say."""

from dataclasses import dataclass

import pytest
import torch

from evalkit.errors import UsageError
from evalkit.model import tiny as llama
from evalkit.policies import build
from evalkit.policy import LayerCache, Policy
from evalkit.retention.chat import Chat
from evalkit.retention.protocol import load as protocol
from evalkit.retention.records import share
from evalkit.retention.scripts import Script, spoken
from evalkit.retention.walk import Walk
from evalkit.session import Engine
from evalkit.shares import SPAN
from tests.test_retention_chat import TURNED, tokenizer
from tests.test_retention_scripts import FACT, conversation

CHAT = Chat.of(tokenizer(TURNED))
MODEL = llama(2, vocab_size=260)
KNOBS = {"infinigen": {"dense_layers": 1, "alpha": 1.0}, "quest": {"dense_layers": 0, "page": 8}}
SOME = ("full", "h2o", "snapkv", "streaming_llm", "quest", "infinigen")


def script(name="a", letters=6, turns=4):
    return Script(f"b/{name}", "whole", (name,), conversation(name, turns, letters).exchanges, (turns // 2, turns), FACT)


SCRIPTS = [script("a", 6), script("b", 11), script("c", 3)]


def walk(positions=4096, **given):
    flags = {"turns": "2,4", "answer_cap": "4", "headroom": "16", "reply_cap": "9", **given}
    engine = Engine(MODEL, calibration=lambda: list(range(2, 130)))
    return Watched(engine, CHAT, protocol(given=flags), positions)


class Watched(Walk):
    """A walk whose conversations can be looked at when it is over."""

    def begun(self, *given):
        talk = super().begun(*given)
        self.__dict__.setdefault("talks", []).append(talk)
        return talk


class Silent(Watched):
    """A walk on which nothing is asked."""

    def ask(self, talks, turn):
        pass


def policy(name):
    return build(name, None if name == "full" else "30%", **KNOBS.get(name, {}))


def timeless(queries):
    return [
        {name: value for name, value in query.items() if name not in ("seconds", "ttft", "tpot", "logprobs")} for query in queries
    ]


def held(walked):
    """All that the conversations of a walk hold at its end."""
    return [
        part
        for talk in walked.talks
        for cache in talk.session.caches
        for part in (cache.positions, *cache.entries.dense(), *cache.marks.values(), *cache.notes.values())
    ]


@pytest.mark.parametrize("replies", ["replay", "generate"])
@pytest.mark.parametrize("name", SOME)
def test_a_conversation_that_is_asked_goes_on_bit_by_bit_as_one_that_is_not(name, replies):
    asked = walk(replies=replies)
    asked.through(SCRIPTS[:2], policy(name))
    silent = Silent(asked.engine, CHAT, asked.protocol, 4096)
    silent.through(SCRIPTS[:2], policy(name))
    assert len(held(asked)) == len(held(silent)) > 0
    assert all(torch.equal(one, other) for one, other in zip(held(asked), held(silent), strict=True))


@pytest.mark.parametrize("replies", ["replay", "generate"])
@pytest.mark.parametrize("name", SOME)
def test_a_conversation_walks_as_it_would_alone(name, replies):
    together = walk(replies=replies).through(SCRIPTS, policy(name))
    for one, found in zip(SCRIPTS, together, strict=True):
        (alone,) = walk(replies=replies).through([one], policy(name))
        assert timeless(alone) == timeless(found)
        for mine, theirs in zip(alone, found, strict=True):
            assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=2e-4)


def test_a_message_and_its_reply_taken_in_together_change_nothing(monkeypatch):
    together, apart = walk(), walk()
    found = together.through(SCRIPTS, build("full"))
    monkeypatch.setattr(Walk, "at_once", lambda *given: False)
    for queries, others in zip(found, apart.through(SCRIPTS, build("full")), strict=True):
        assert timeless(queries) == timeless(others)
        for one, other in zip(queries, others, strict=True):
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)
    torch.testing.assert_close(held(together), held(apart))


def test_contexts_and_distances_are_those_of_the_tokens():
    (queries,) = walk().through(SCRIPTS[:1], policy("full"))
    said = spoken(SCRIPTS[0], CHAT)
    assert [query["context_tokens"] for query in queries] == [said.context(turn) for turn in (2, 4)]
    last = max(said.messages[0].statement)
    assert [query["distance_tokens"] for query in queries] == [said.context(t) - len(said.questions[t]) - last for t in (2, 4)]
    assert [query["question"] for query in queries] == [SCRIPTS[0].question(turn) for turn in (2, 4)]


def test_survival_is_the_share_of_the_facts_own_entries_that_is_held():
    done = walk()
    (queries,) = done.through(SCRIPTS[:1], build("streaming_llm", "30%"))
    (talk,), query = done.talks, queries[0]
    said = spoken(SCRIPTS[0], CHAT)
    line = [token for message in said.messages for token in (*message.user, *message.reply)]
    assert CHAT.tokenizer.decode([line[place] for place in talk.told]) == "Bartleby"
    seen = query["context_tokens"] - 1
    allowance = int(0.3 * seen)
    kept = {*range(4), *range(seen - allowance + 4, seen)}
    expected = sum(place in kept for place in talk.statement) / len(talk.statement)
    assert query["survival"] == pytest.approx(expected, abs=1e-6)
    assert query["survival_heads"] == [[round(expected, 4)] * 2] * 3


@pytest.mark.parametrize(("name", "held_share", "survival"), [("full", 1.0, 1.0), ("quest", 1.0, 1.0), ("h2o", 0.3, None)])
def test_what_is_held_and_read_is_that_of_the_query(name, held_share, survival):
    (queries,) = walk().through(SCRIPTS[:1], policy(name))
    for query in queries:
        assert share(query, "held") == pytest.approx(held_share, abs=0.01)
        assert (share(query, "read") == 1) == (name == "full")
        assert query["survival"] == survival or (survival is None and query["survival"] < 1)


def test_a_control_has_nothing_to_survive():
    told, control = (walk().through(SCRIPTS[:1], policy("full"), control=control)[0] for control in (False, True))
    assert [query["survival"] for query in control] == [None, None]
    fact = spoken(SCRIPTS[0], CHAT).messages[0]
    fewer = {a["context_tokens"] - b["context_tokens"] for a, b in zip(told, control, strict=True)}
    opening = len(CHAT.user("", first=True)) - len(CHAT.user("", first=False))
    assert fewer == {len(fact.user) + len(fact.reply) - opening}


def test_a_later_fact_is_asked_for_later():
    (queries,) = walk(inject_at="3").through(SCRIPTS[:1], policy("h2o"))
    assert [query["turn"] for query in queries] == [4]


def test_generated_replies_are_the_model_s_own_and_are_closed():
    done = walk(replies="generate")
    (queries,) = done.through(SCRIPTS[:1], policy("full"))
    replay = walk().through(SCRIPTS[:1], policy("full"))[0]
    assert [query["context_tokens"] for query in queries] != [query["context_tokens"] for query in replay]
    messages = spoken(SCRIPTS[0], CHAT).messages
    users = sum(len(message.user) for message in messages) + len(messages[0].reply)
    own = queries[-1]["context_tokens"] - users - len(spoken(SCRIPTS[0], CHAT).questions[4])
    assert 4 <= own <= 4 * (9 + len(CHAT.closing))


def test_generated_replies_that_use_up_the_positions_end_the_conversation():
    most = spoken(SCRIPTS[0], CHAT).context(2) + 60
    (queries,) = walk(most, replies="generate", reply_cap="40").through(SCRIPTS[:1], policy("full"))
    assert [query["turn"] for query in queries] in ([], [2])


@pytest.mark.parametrize("positions", range(360, 760, 40))
def test_nothing_is_said_beyond_the_last_position(positions):
    walked = walk(positions, replies="generate", reply_cap="40", answer_cap="30", headroom="0").through(SCRIPTS, policy("full"))
    assert all(query["context_tokens"] + 30 <= positions for queries in walked for query in queries)


@pytest.mark.parametrize("replies", ["replay", "generate"])
def test_what_is_held_is_counted_once_for_each_query(replies):
    walked = walk(replies=replies).through(SCRIPTS, policy("h2o"))
    entries = 3 * 2  # layers, KV heads
    for query in (query for queries in walked for query in queries):
        assert query["tally"][SPAN] == entries * (query["context_tokens"] - 1)


@pytest.mark.parametrize("replies", ["replay", "generate"])
def test_a_reply_that_says_the_answer_again_is_on_record(replies, monkeypatch):
    heard = []
    monkeypatch.setattr("evalkit.retention.walk.contains", lambda text, accepted: heard.append(text) or len(heard) > 2)
    (queries,) = walk(replies=replies).through(SCRIPTS[:1], policy("full"))
    assert len(heard) == (4 if replies == "generate" else 0)
    assert [query["restated"] for query in queries] == ([False, True] if replies == "generate" else [False, False])


@dataclass(frozen=True, kw_only=True)
class Idle(Policy):
    """Says it evicts, and does not."""

    def evict(self, cache: LayerCache, query: torch.Tensor) -> LayerCache:
        return cache


def test_a_policy_that_never_acted_is_an_error():
    with pytest.raises(UsageError, match="Idle at budget=30% did nothing"):
        walk().through(SCRIPTS[:1], Idle(budget=policy("h2o").budget))
