"""The retention suite's facts: each can be told, asked for and scored, and none gives away itself or another.

It reads the file as anyone would and knows nothing of how a fact is planted or queried.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Fact = dict[str, Any]

LINES = (Path(__file__).parent.parent / "retention" / "facts.jsonl").read_text(encoding="utf-8").splitlines()
FACTS: list[Fact] = [json.loads(line) for line in LINES]
KINDS = ("name", "place", "number", "date", "preference", "job", "relation", "plan")
TEXTS = ("id", "kind", "statement", "acknowledgement")
LISTS = ("questions", "answers", "distractors")
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def plain(text: str) -> str:
    """A text as a scorer sees it: small letters and digits, one blank between words."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def told(fact: Fact) -> list[str]:
    """What is said of a fact, questions included."""
    return [fact["statement"], fact["acknowledgement"], *fact["questions"]]


def occurrences(answers: Iterable[str], text: str) -> list[str]:
    """Where any spelling of an answer stands in a text, inside of words too; one place counts once, by its longest spelling."""
    spellings = sorted({plain(answer) for answer in answers}, key=len, reverse=True)
    return re.findall("|".join(map(re.escape, spellings)), plain(text))


def shape(answer: str) -> str:
    """A number or a date with 9 for every digit, one word for every month and one for every day; of any other answer, nothing."""
    named = re.sub("|".join(MONTHS), "month", re.sub("|".join(DAYS), "day", answer))
    return re.sub(r"\d", "9", named) if re.search(r"\d", named) else ""


def repeated(texts: Iterable[str]) -> list[str]:
    return [text for text, count in Counter(map(plain, texts)).items() if count > 1]


def opening(text: str) -> str:
    """The first three words of a text."""
    return " ".join(plain(text).split()[:3])


def wrong_distractors(agree: Callable[[str, str], bool]) -> Iterator[tuple[str, str]]:
    """The distractors, with their facts' names, for which `agree(first accepted answer, distractor)` is false."""
    return (
        (fact["id"], distractor)
        for fact in FACTS
        for distractor in fact["distractors"]
        if not agree(fact["answers"][0], distractor)
    )


# The form of the file


def test_every_fact_has_the_same_fields_in_the_same_order() -> None:
    assert [fact for fact in FACTS if tuple(fact) != TEXTS + LISTS] == []


def test_every_field_holds_text_without_blanks_around_it() -> None:
    texts = [text for fact in FACTS for text in [*(fact[name] for name in TEXTS), *(one for name in LISTS for one in fact[name])]]
    assert [text for text in texts if not isinstance(text, str) or not text or text != " ".join(text.split())] == []
    assert [fact["id"] for fact in FACTS if not all(isinstance(fact[name], list) for name in LISTS)] == []


def test_there_are_130_facts_or_more_and_at_least_16_of_each_kind() -> None:
    counts = Counter(fact["kind"] for fact in FACTS)
    assert len(FACTS) >= 130
    assert set(counts) == set(KINDS)
    assert min(counts.values()) >= 16


def test_facts_are_numbered_within_their_kind() -> None:
    expected = [f"{kind}-{number:03}" for kind in KINDS for number in range(1, 1 + sum(fact["kind"] == kind for fact in FACTS))]
    assert [fact["id"] for fact in FACTS] == expected
    assert [fact["id"] for fact in FACTS if not fact["id"].startswith(fact["kind"])] == []


def test_every_character_is_plain() -> None:
    texts = [text for fact in FACTS for text in told(fact) + fact["answers"] + fact["distractors"]]
    assert [text for text in texts if not (text.isascii() and text.isprintable())] == []


# What is said


def test_a_statement_is_one_or_two_sentences_in_the_first_person() -> None:
    ends = {fact["id"]: re.findall(r"(?<!\bDr)(?<!\bMr)[.!?]+(?: |$)", fact["statement"]) for fact in FACTS}
    speaker = re.compile(r"\b(i|me|my|mine|we|us|our)\b", re.IGNORECASE)
    assert {name: found for name, found in ends.items() if len(found) > 2} == {}
    assert [fact["id"] for fact in FACTS if not speaker.search(fact["statement"])] == []


def test_a_statement_is_at_most_35_words_and_an_acknowledgement_20() -> None:
    for field, longest in (("statement", 35), ("acknowledgement", 20)):
        assert [fact["id"] for fact in FACTS if len(fact[field].split()) > longest] == []


def test_a_fact_is_asked_for_in_two_ways() -> None:
    assert [fact["id"] for fact in FACTS if len(fact["questions"]) != 2] == []
    assert [question for fact in FACTS for question in fact["questions"] if question[-1] != "?"] == []


def test_nothing_is_said_twice() -> None:
    assert repeated(text for fact in FACTS for text in told(fact)) == []


def test_no_two_statements_and_no_two_acknowledgements_open_with_the_same_three_words() -> None:
    for field in ("statement", "acknowledgement"):
        assert repeated(opening(fact[field]) for fact in FACTS) == []


# Answers


def test_the_first_accepted_answer_is_one_to_four_words() -> None:
    assert [fact["id"] for fact in FACTS if not 1 <= len(fact["answers"][0].split()) <= 4] == []


def test_numbers_and_dates_alone_have_digits() -> None:
    assert [fact["id"] for fact in FACTS if bool(shape(fact["answers"][0])) != (fact["kind"] in ("number", "date"))] == []


def test_a_number_has_2_to_7_digits() -> None:
    numbers = {fact["id"]: re.sub(r"\D", "", fact["answers"][0]) for fact in FACTS if fact["kind"] == "number"}
    assert {name: digits for name, digits in numbers.items() if not 2 <= len(digits) <= 7} == {}


def test_a_statement_holds_its_answer_once() -> None:
    for fact in FACTS:
        assert len(occurrences(fact["answers"][:1], fact["statement"])) == 1, fact["id"]
        assert len(occurrences(fact["answers"], fact["statement"])) == 1, fact["id"]


def test_neither_an_acknowledgement_nor_a_question_holds_the_answer() -> None:
    given_away = {fact["id"]: found for fact in FACTS for text in told(fact)[1:] if (found := occurrences(fact["answers"], text))}
    assert given_away == {}


def test_no_accepted_answer_is_listed_twice_or_shared_by_two_facts() -> None:
    assert [fact["id"] for fact in FACTS if len(set(fact["answers"])) < len(fact["answers"])] == []
    assert repeated(spelling for fact in FACTS for spelling in {plain(answer) for answer in fact["answers"]}) == []


def test_no_answer_is_in_what_is_said_of_another_fact() -> None:
    collisions = [
        (fact["id"], other["id"], found)
        for fact in FACTS
        for other in FACTS
        if other is not fact and (found := occurrences(fact["answers"], " / ".join(told(other))))
    ]
    assert collisions == []


# Distractors


def test_a_fact_has_six_different_distractors_or_more() -> None:
    assert [fact["id"] for fact in FACTS if len(fact["distractors"]) < 6 or repeated(fact["distractors"])] == []


def test_no_distractor_holds_an_accepted_answer_or_is_held_by_one() -> None:
    pairs = [(plain(one), plain(two)) for fact in FACTS for one in fact["distractors"] for two in fact["answers"]]
    assert [pair for pair in pairs if pair[0] in pair[1] or pair[1] in pair[0]] == []


def test_no_distractor_is_in_what_is_said_of_its_fact() -> None:
    said = {fact["id"]: occurrences(fact["distractors"], " / ".join(told(fact))) for fact in FACTS}
    assert {name: found for name, found in said.items() if found} == {}


def test_a_distractor_has_as_many_words_as_the_answer_or_one_more_or_less() -> None:
    assert list(wrong_distractors(lambda answer, distractor: abs(len(distractor.split()) - len(answer.split())) <= 1)) == []


def test_a_distractor_is_at_most_twice_as_long_as_the_answer_and_at_least_half() -> None:
    assert list(wrong_distractors(lambda answer, distractor: len(answer) <= 2 * len(distractor) <= 4 * len(answer))) == []


def test_a_distractor_has_the_digits_months_and_days_of_the_answer_in_the_same_places() -> None:
    assert list(wrong_distractors(lambda answer, distractor: shape(answer) == shape(distractor))) == []


def test_a_distractor_begins_with_a_capital_exactly_if_the_answer_does() -> None:
    assert list(wrong_distractors(lambda answer, distractor: answer[0].isupper() == distractor[0].isupper())) == []
