"""Conversations from files in every form, and how they fill buckets."""

import json
from collections import Counter

import pytest

from evalkit.errors import UsageError
from evalkit.retention import sources
from evalkit.retention.chat import Chat
from evalkit.retention.facts import Fact, load
from evalkit.retention.protocol import load as protocol
from evalkit.retention.scripts import Casting, Script, spoken
from evalkit.retention.sources import Conversation
from tests.test_retention_chat import TURNED, tokenizer

CHAT = Chat.of(tokenizer(TURNED))
FACT = Fact(
    "f",
    "name",
    "My parrot is Bartleby.",
    "Nice!",
    ("What is my parrot called?", "Whose cage is it?"),
    ("Bartleby",),
    ("Tom", "Jim"),
)


# Sources

FORMS = {
    "lmsys": {"conversation_id": "x", "language": "English",
              "conversation": [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "Hello"}]},
    "sharegpt": {"id": "x", "conversations": [{"from": "system", "value": "Be kind"}, {"from": "human", "value": "Hi"},
                                              {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "unanswered"}]},
    "openai": {"id": "x", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url"}]},
                                       {"role": "assistant", "content": "Hello"}]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_form_is_read_from_every_file(form, kind, tmp_path):
    file = tmp_path / f"some.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps(FORMS[form]) + "\n\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        record = (
            FORMS[form]
            if form != "openai"
            else {"id": "x", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
        )
        parquet.write_table(pyarrow.Table.from_pylist([record]), file)
    for source in (file, tmp_path):
        assert sources.load(str(source), "English", 1) == [Conversation("x", (("Hi", "Hello"),))]


def test_messages_in_a_row_are_one_and_empty_ones_are_none(tmp_path):
    said = [
        ("assistant", "early"),
        ("user", "a"),
        ("user", "b"),
        ("assistant", ""),
        ("assistant", "c"),
        ("user", "d"),
        ("assistant", "e"),
    ]
    record = {"messages": [{"role": role, "content": text} for role, text in said]}
    (tmp_path / "talk.jsonl").write_text(json.dumps(record) + "\n")
    assert sources.load(str(tmp_path / "talk.jsonl"), "English", 1) == [Conversation("talk-1", (("a\n\nb", "c"), ("d", "e")))]


def test_other_languages_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({**FORMS["lmsys"], "language": "German"}) + "\n")
    with pytest.raises(UsageError, match="holds no conversation in English"):
        sources.load(str(tmp_path), "English", 1)
    assert len(sources.load(str(tmp_path), "german", 1)) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "a.jsonl, line 1 is no JSON"),
        ('{"text": "x"}', r"a.jsonl, line 1 is no conversation: give the form of LMSYS \(conversation\), ShareGPT"),
        ('{"messages": [{"role": 3, "content": "x"}]}', "line 1 has a message without a role or a text"),
    ],
)
def test_what_is_no_conversation_is_named(text, told, tmp_path):
    (tmp_path / "a.jsonl").write_text(text + "\n")
    with pytest.raises(UsageError, match=told):
        sources.load(str(tmp_path / "a.jsonl"), "English", 1)


def test_a_source_that_is_not_there_is_named():
    with pytest.raises(UsageError, match=r"source=buildin is no file .*did you mean 'builtin'"):
        sources.load("buildin", "English", 1)


def test_the_gated_conversations_without_a_token_say_in_a_line_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(
        UsageError, match=r"it is gated and there is no token.*ask for access at https.*or give --source builtin"
    ) as caught:
        sources.load("lmsys", "English", 12)
    assert "\n" not in str(caught.value)


def test_the_hub_gives_the_first_conversations_that_are_long_enough(monkeypatch):
    long = {"conversation_id": "y", "language": "English", "conversation": 2 * FORMS["lmsys"]["conversation"]}
    longer = {**long, "conversation_id": "z", "conversation": 2 * long["conversation"]}
    records = [("1", FORMS["lmsys"]), ("2", {**long, "language": "French"}), ("3", long), ("4", longer), ("5", longer)]
    monkeypatch.setattr(sources, "_hub", lambda: iter(records))
    monkeypatch.setattr(sources, "POOL", 2)
    assert [one.id for one in sources.load("lmsys", "English", 2)] == ["y", "z"]


def test_conversations_of_one_id_are_told_apart_and_the_same_one_counts_once(tmp_path):
    def talk(text, name="x"):
        return {"id": name, "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes"}]}

    for file, given in {"a": [talk("Hi"), talk("Ho"), talk("He", "x-2")], "b": [talk("Hi"), talk("Ha"), talk("Ho", "y")]}.items():
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in given))
    found = sources.load(str(tmp_path), "English", 1)
    assert [(one.id, one.exchanges[0][0]) for one in found] == [("x", "Hi"), ("x-2", "Ho"), ("x-2-2", "He"), ("x-3", "Ha")]


def test_half_a_letter_becomes_one_that_a_file_can_hold(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Hi \\ud83d"}, {"role": "assistant", "content": "\\ud83d\\ude00"}]}\n'
    )
    (found,) = sources.load(str(tmp_path), "English", 1)
    assert found.exchanges == (("Hi \ufffd", "\U0001f600"),)


def test_the_project_s_own_conversations_are_there():
    assert len(sources.load("builtin", "English", 1)) >= 24


# Buckets


def conversation(name, exchanges, letters=40):
    return Conversation(
        name, tuple((f"{name} asks {i} {'x' * letters}", f"{name} replies {i} {'y' * letters}") for i in range(exchanges))
    )


def casting(conversations, bucket="600-900", facts=(FACT,), positions=4096, **given):
    flags = {"bucket": bucket, "turns": "2,4", "conversations": "6", "headroom": "100", **given}
    return Casting(protocol(given=flags), CHAT, conversations, facts, positions)


def scripts(*given, **more):
    cast = casting(*given, **more)
    return cast.scripts(cast.protocol.buckets[0])


def test_a_conversation_that_fits_is_taken_as_it_is_up_to_the_last_query():
    (found,) = scripts([conversation("a", 5, 60)])
    assert (found.making, found.sources, found.exchanges) == ("whole", ("a",), conversation("a", 5, 60).exchanges[:4])


def test_turns_are_merged_where_a_conversation_is_too_short_for_its_bucket_otherwise():
    (found,) = scripts([conversation("a", 12)], bucket="900-1300")
    assert found.making == "merged" and len(found.exchanges) > 4
    assert found.exchanges == conversation("a", 12).exchanges[: len(found.exchanges)]
    assert [found.end(turn) for turn in range(5)] == [turn * len(found.exchanges) // 4 for turn in range(5)]


def test_conversations_are_joined_in_equal_shares_where_none_is_long_enough():
    found = scripts([conversation(name, 5) for name in "abcd"], bucket="900-1300")
    assert {script.making for script in found} == {"joined"} and len({script.sources for script in found}) == len(found) == 6
    for script in found:
        shares = Counter(text.split()[0] for text, _ in script.exchanges)
        assert list(shares) == list(script.sources) and max(shares.values()) - min(shares.values()) <= 1


def test_every_context_lies_in_its_bucket():
    cast = casting([conversation(name, 5 + place) for place, name in enumerate("abcdef")], bucket="700-1000")
    for script in cast.scripts(cast.protocol.buckets[0]):
        said = spoken(script, CHAT)
        assert 700 <= said.context(4) < 1000
        before = [(message.user, message.reply) for message in said.messages]
        assert len(before) == len(script.exchanges) + 1
        assert said.context(4) == sum(len(user) + len(reply) for user, reply in before) + len(said.questions[4])


def test_by_conversation_the_whole_length_counts():
    long = conversation("a", 9)
    assert [script.sources for script in scripts([long], bucket="1100-1500", bucket_by="conversation")] == [("a",)]
    assert len(scripts([long], bucket="1100-1500", bucket_by="conversation")[0].exchanges) == 4


def test_the_choice_is_the_seed_s():
    many = [conversation(name, 5) for name in "abcdefghijkl"]
    first, again, other = (scripts(many, seed=seed) for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_fact_is_told_where_the_conversation_does_not_speak_of_it():
    other = Fact("g", "name", "My cat is Ada.", "Nice!", ("What is my cat called?", "Who purrs?"), ("Ada",), ("Bea", "Cleo"))
    speaking = Conversation("a", (("Is Tom here?", "No." + "x" * 300), *conversation("a", 5).exchanges))
    assert [script.fact.id for script in scripts([speaking], facts=[FACT, other])] == ["g"]
    with pytest.raises(UsageError, match="fills no conversation of 4 turns into bucket=600-900"):
        scripts([speaking], facts=[FACT])


def test_facts_take_turns():
    facts = load()[:3]
    found = scripts([conversation(name, 5) for name in "abcdef"], facts=facts)
    assert Counter(script.fact.id for script in found) == {fact.id: 2 for fact in facts}


def test_a_bucket_must_leave_the_headroom():
    with pytest.raises(UsageError, match="bucket=600-900 with headroom=100 does not fit the model's 650 positions"):
        scripts([conversation("a", 5)], positions=650)
    assert all(
        spoken(script, CHAT).context(4) + 100 <= 850 for script in scripts([conversation(n, 5) for n in "abc"], positions=850)
    )


def test_what_an_answer_may_take_is_left_free_whatever_the_headroom():
    made = scripts([conversation(n, 5) for n in "abc"], positions=850, headroom="0", answer_cap="120")
    assert made and all(spoken(script, CHAT).context(4) + 120 <= 850 for script in made)
    assert any(spoken(script, CHAT).context(4) + 120 > 850 for script in scripts([conversation(n, 5) for n in "abc"]))


# In tokens


def script(asked=(1, 2), exchanges=5, phrasing=0):
    return Script("b/0", "whole", ("a",), conversation("a", exchanges, 5).exchanges, asked, FACT, phrasing)


@pytest.mark.parametrize("inject_at", [1, 2])
def test_the_fact_is_told_before_its_turn_and_found_again(inject_at):
    said = spoken(script(), CHAT, inject_at)
    assert said.fact == script().end(inject_at - 1)
    telling = said.messages[said.fact]
    decoded = lambda places: CHAT.tokenizer.decode([telling.user[place] for place in places])  # noqa: E731
    assert (decoded(telling.statement), decoded(telling.told)) == ("My parrot is Bartleby.", "Bartleby")
    assert CHAT.text(telling.reply) == "Nice!"
    assert list(said.questions) == [turn for turn in (1, 2) if turn >= inject_at]


def test_a_control_is_the_same_without_the_fact():
    told, control = spoken(script(), CHAT), spoken(script(), CHAT, control=True)
    assert control.fact is None and control.messages[1:] == told.messages[2:]
    assert control.messages[0].reply == told.messages[1].reply and control.questions == told.questions
    assert {turn: end + 1 for turn, end in control.ends.items()} == told.ends


def test_phrasings_take_turns():
    one, other = FACT.questions
    assert [script((4, 8, 12)).question(turn) for turn in (4, 8, 12)] == [one, other, one]
    assert [script((4, 8, 12), phrasing=3).question(turn) for turn in (4, 8, 12)] == [other, one, other]
