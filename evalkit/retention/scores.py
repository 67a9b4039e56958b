"""Whether an answer is right, three ways: it contains what was asked for, it nearly does, the model finds it likeliest. Knows no model."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from rapidfuzz import fuzz

ARTICLES = frozenset({"a", "an", "the"})
APOSTROPHES = re.compile("[\u2018\u2019\u02bc]")
UNSEEN = ("Mn", "Cf")  # Unicode's categories of accents and of marks such as a soft hyphen; dashes part words
UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NUMBERS = {word: number for number, word in enumerate(UNITS)} | {word: 10 * (place + 2) for place, word in enumerate(TENS)}


def normalised(text: str) -> str:
    """Return text in small letters without accents, punctuation and articles, numbers up to 99 in figures."""
    decomposed = unicodedata.normalize("NFKD", APOSTROPHES.sub("'", text)).casefold()
    plain = "".join(letter for letter in decomposed if unicodedata.category(letter) not in UNSEEN)
    plain = re.sub(r"(?<=\d)[,'](?=\d{3}\b)", "", plain)  # 1,200
    words = [word for word in re.sub(r"[\W_]+", " ", plain.replace("'", "")).split() if word not in ARTICLES]
    return " ".join(_in_figures(words))


def _in_figures(words: Sequence[str]) -> list[str]:
    """Turn number words into figures: seven, twenty one."""
    found: list[str] = []
    tens = 0  # spoken last
    for word in words:
        number = NUMBERS.get(word)
        if tens and number is not None and 0 < number < 10:
            found[-1], tens = str(tens + number), 0
            continue
        tens = number if number is not None and number >= 20 else 0
        found.append(word if number is None else str(number))
    return found


def contains(text: str, accepted: Sequence[str]) -> bool:
    """Whether the normalised text has one of the accepted answers in it, as whole words."""
    said = f" {normalised(text)} "
    return any(f" {normalised(answer)} " in said for answer in accepted)


def similarity(text: str, accepted: Sequence[str]) -> float:
    """Return how near the text comes to holding an accepted answer: the largest of rapidfuzz's partial ratios, 0 to 100."""
    said = normalised(text)
    return max(_partial(normalised(answer), said) for answer in accepted)


def _partial(answer: str, said: str) -> float:
    """The best match of the answer inside what was said; a shorter text is compared whole, as a part of an answer is not the answer."""
    return fuzz.partial_ratio(answer, said) if len(said) >= len(answer) else fuzz.ratio(answer, said)


def rank(logprobs: Sequence[float]) -> int:
    """Return the place of the first of several answers by likelihood, 1 for the likeliest; equals stand before it."""
    return 1 + sum(other >= logprobs[0] for other in logprobs[1:])


def nearly(text: str, accepted: Sequence[str], distractors: Sequence[str], likeness: float) -> bool:
    """Whether a text has an accepted answer in it but for its spelling: one is as like as `likeness`, of 100, and liker than every
    distractor. The figures of an answer have to be right: a date is not misspelt for another.
    """
    said = set(normalised(text).split())
    able = [answer for answer in accepted if said.issuperset(re.findall(r"\S*\d\S*", normalised(answer)))]
    found = similarity(text, able) if able else 0.0
    return found >= likeness and found > similarity(text, distractors)


def judged(answer: str, accepted: Sequence[str], distractors: Sequence[str], likeness: float) -> dict[str, Any]:
    """Return what is recorded of an answer's text; `likeness`, of 100, is what counts as nearly right."""
    right = contains(answer, accepted)
    return {
        "answer": answer,
        "contains": right,
        "likeness": round(similarity(answer, accepted), 1),
        "fuzzy": right or nearly(answer, accepted, distractors, likeness),
    }
