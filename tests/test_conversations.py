"""The retention suite's own conversations: enough of them, long enough, each unlike the others, and none telling who the user is.

It reads the files as anyone would and knows nothing of how a conversation is replayed.
"""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Conversation = dict[str, Any]

FILES = sorted((Path(__file__).parent.parent / "retention" / "conversations").glob("*.jsonl"))
LINES = [line for path in FILES for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
CONVERSATIONS: list[Conversation] = [json.loads(line) for line in LINES]

# How users say who they are; facts of this sort are planted, so that a conversation must not bring its own.
PERSONAL = re.compile(
    r"\b(my name is|call me|i am called|i'?m called|i live in|i'?m from|i am from|i was born|my birthday|i work (as|at|for|in)"
    r"|my job|my (phone )?number is|my pin|my password is|my address|my favou?rite|my appointment)\b",
    re.IGNORECASE,
)

each_conversation = pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation["id"])


def said(conversation: Conversation, role: str) -> list[str]:
    """What one side says, message by message."""
    return [message["content"] for message in conversation["messages"] if message["role"] == role]


def words(conversation: Conversation) -> int:
    return sum(len(message["content"].split()) for message in conversation["messages"])


def sentences(conversation: Conversation) -> Iterator[str]:
    """The sentences of six words or more, in small letters and without punctuation; a line's end ends a sentence too."""
    for message in conversation["messages"]:
        for sentence in re.split(r"[.!?:]+\s|\n", message["content"]):
            found = re.findall(r"\w+", sentence.casefold())
            if len(found) >= 6:
                yield " ".join(found)


def is_plain(character: str) -> bool:
    """Whether a character is printable ASCII, a line's end, a Latin letter or one of the two inverted marks of Spanish."""
    if character.isascii():
        return character.isprintable() or character == "\n"
    return character in "¿¡" or unicodedata.name(character, "").startswith("LATIN ")


def test_there_are_at_least_26_conversations() -> None:
    assert len(CONVERSATIONS) >= 26


def test_no_id_and_no_topic_occurs_twice() -> None:
    for key in ("id", "topic"):
        assert max(Counter(conversation[key] for conversation in CONVERSATIONS).values()) == 1


@each_conversation
def test_a_conversation_has_an_id_a_topic_of_one_line_and_messages(conversation: Conversation) -> None:
    assert list(conversation) == ["id", "topic", "messages"]
    assert re.fullmatch(r"[a-z]+-\d\d", conversation["id"])
    assert re.fullmatch(r"\S.{9,}\S", conversation["topic"])
    for message in conversation["messages"]:
        assert list(message) == ["role", "content"]
        assert message["content"] == message["content"].strip() != ""


@each_conversation
def test_user_and_assistant_take_at_least_13_turns_each(conversation: Conversation) -> None:
    roles = [message["role"] for message in conversation["messages"]]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert len(roles) >= 26


@each_conversation
def test_a_conversation_has_between_850_and_1400_words(conversation: Conversation) -> None:
    assert 850 <= words(conversation) <= 1400


def test_half_of_the_conversations_have_more_than_1000_words() -> None:
    assert sorted(map(words, CONVERSATIONS))[len(CONVERSATIONS) // 2] > 1000


@each_conversation
def test_a_reply_has_between_30_and_120_words_and_is_longer_than_most_questions(conversation: Conversation) -> None:
    replies = [len(reply.split()) for reply in said(conversation, "assistant")]
    questions = [len(question.split()) for question in said(conversation, "user")]
    assert min(replies) >= 30 and max(replies) <= 120
    assert sum(questions) < sum(replies) / 2


def test_no_two_conversations_share_a_sentence_of_six_words() -> None:
    where: defaultdict[str, set[str]] = defaultdict(set)
    for conversation in CONVERSATIONS:
        for sentence in sentences(conversation):
            where[sentence].add(conversation["id"])
    assert len(where) > 50 * len(CONVERSATIONS)
    assert {sentence: names for sentence, names in where.items() if len(names) > 1} == {}


@each_conversation
def test_no_message_occurs_twice_in_a_conversation(conversation: Conversation) -> None:
    assert max(Counter(message["content"].casefold() for message in conversation["messages"]).values()) == 1


@each_conversation
def test_no_number_has_five_digits_in_a_row(conversation: Conversation) -> None:
    assert [message["content"] for message in conversation["messages"] if re.search(r"\d{5}", message["content"])] == []


@each_conversation
def test_the_user_says_nothing_that_a_planted_fact_might_say(conversation: Conversation) -> None:
    assert [message for message in said(conversation, "user") if PERSONAL.search(message)] == []


@each_conversation
def test_code_blocks_are_closed(conversation: Conversation) -> None:
    assert [message["content"] for message in conversation["messages"] if message["content"].count("```") % 2] == []


def test_the_letters_are_latin() -> None:
    texts = [text for each in CONVERSATIONS for text in (each["topic"], *said(each, "user"), *said(each, "assistant"))]
    assert {character for text in texts for character in text if not is_plain(character)} == set()


def test_some_conversations_have_code_and_some_have_lists() -> None:
    marked = {
        mark: sum(any(re.search(mark, reply, re.MULTILINE) for reply in said(each, "assistant")) for each in CONVERSATIONS)
        for mark in ("^```", "^- ", r"^1\. ")
    }
    assert min(marked.values()) >= 5
