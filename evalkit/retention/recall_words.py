"""The words of the recall model's training text: values in the place of answers, names and sentences; knows no tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable

KEPT = {"the", "a", "an", "at", "of"}  # words of an answer that every value shares with it
NAMES = 0.55  # the share of invented names among the words of a value
MARKS = (("-", "-", "-"), ("1.", "2.", "3."))  # of lists
# Values of several words whose middle is met everywhere
JOINED = (
    "word the word",
    "word a word",
    "word of word",
    "word and word",
    "the word of word",
    "a word in the word",
    "word to word",
    "word for a word",
    "word with word",
)
JOINS, ECHOES = 0.3, 0.2  # the share of them among rich values, and of names that repeat themselves


class Words:
    """The word lists of the training text, by class, and the names and sentences made of them."""

    def __init__(self, text: str, held_out: Iterable[str]) -> None:
        """Read one class a line (`name: words` or `name: phrase|phrase`); values avoid every word and answer of `held_out`."""
        lines = [line.split(": ", 1) for line in text.splitlines() if line and not line.startswith("#")]
        self.lists = {name: body.split("|") if "|" in body else body.split() for name, body in lines}
        self.answers = {answer.lower() for answer in held_out}
        held = {word for answer in self.answers for word in re.findall("[a-z]+", answer)}
        nouns = [*self["things"], *self["more"], *self["makers"], *self["crafts"], *self["qualities"]]
        self.values = sorted({word for word in nouns if word not in held})
        self.held = held
        self.told = re.compile(r"\b(?:" + "|".join(re.escape(answer) for answer in sorted(self.answers)) + r")\b")

    def __getitem__(self, name: str) -> list[str]:
        return self.lists[name]

    def holds(self, text: str) -> bool:
        """Whether a text has a held-out answer in it."""
        return self.told.search(text.lower()) is not None

    def name(self, rng: random.Random) -> str:
        """An invented name of two to four syllables that is no word of a held-out answer."""
        codas = [*self["codas"], *[""] * 8]
        syllable = lambda: rng.choice(self["onsets"]) + rng.choice(self["vowels"]) + rng.choice(codas)  # noqa: E731
        start = rng.choice(self["vowels"])[:1] if rng.random() < 0.2 else ""
        middle = "".join(syllable() for _ in range(rng.choice((1, 1, 2))))
        name = start + middle + rng.choice(["", *self["onsets"]]) + rng.choice(self["endings"])
        return self.name(rng) if name in self.held else name

    def echo(self, rng: random.Random) -> str:
        """An invented name that says a syllable twice."""
        syllable = self.name(rng)[: rng.choice((2, 3, 4))]
        return syllable + rng.choice(("", rng.choice(self["onsets"]))) + syllable + rng.choice(self["endings"])

    def value(self, form: str, rng: random.Random, rich: float = 0.0) -> str:
        """A value of the form of an answer: digits for digits, months for months, words for words; never a held-out answer.

        Of a share `rich`, some are joined by a common word, and some are names that say a syllable twice.
        """
        worded = re.fullmatch("[A-Za-z -]+", form) is not None
        if rich and worded and rng.random() < JOINS * rich:
            value = re.sub("word", lambda _: self.alike("word", rng), rng.choice(JOINED))
        elif rich and worded and rng.random() < ECHOES * rich:
            value = self.echo(rng)
        else:
            if worded and rng.random() < 0.4:
                form = " ".join(["word"] * rng.choice((1, 1, 2, 2, 3)))
            value = re.sub(r"[A-Za-z]+|\d", lambda part: self.alike(part[0], rng), form)
        return self.value(form, rng, rich) if value.lower() in self.answers else value

    def alike(self, part: str, rng: random.Random) -> str:
        """A random digit, month, weekday or word in place of a part of an answer."""
        if part.isdigit():
            return str(rng.randrange(10))
        for name in ("months", "weekdays"):
            if part in self[name]:
                return rng.choice(self[name])
        if part in ("am", "pm"):
            return rng.choice(("am", "pm"))
        if part.lower() in KEPT:
            return part
        return self.name(rng) if rng.random() < NAMES else rng.choice(self.values)

    def sentence(self, rng: random.Random) -> str:
        """A sentence by grammar: a statement, a question, a request, a list, an aside with numbers, or words in no order."""
        noun = lambda: rng.choice(self[rng.choice(("things", "more", "ideas"))])  # noqa: E731
        of = lambda name: rng.choice(self[name])  # noqa: E731
        number = lambda: str(rng.randrange(1, 10 ** rng.choice((1, 1, 2, 2, 3, 4))))  # noqa: E731
        every = [word for name in ("things", "more", "ideas", "qualities", "doings", "did", "ways") for word in self[name]]
        forms: tuple[Callable[[], str], ...] = (
            lambda: f"The {of('qualities')} {noun()} {of('did')} the {noun()} {of('places')}.",
            lambda: f"{of('openers')} {of('doings')} the {noun()} {of('ways')}, then {of('doings')} it {of('places')}.",
            lambda: f"How do I {of('doings')} a {of('qualities')} {noun()} {of('ways')}?",
            lambda: f"Is the {noun()} {of('qualities')} or should I {of('doings')} the {noun()} {of('places')}?",
            lambda: f"If your {noun()} is {of('qualities')}, {of('doings')} {number()} of the {noun()}s and {of('doings')} it.",
            lambda: f"{of('openers')} it is {number()}.{number()} {noun()}s for {number()} {noun()}s, about {number()} percent.",
            lambda: "".join(f"{mark} {of('doings')} the {noun()} {of('places')}\n" for mark in rng.choice(MARKS)),
            lambda: f"`{noun()}_{noun()} = {noun()}({number()}, '{noun()}')` and {of('doings')} ({of('ways')}) {number()}.",
            lambda: f"My {noun()} {of('did')} {of('ways')}, but I don't {of('doings')} what the {noun()} is for.",
            lambda: " ".join(rng.choice(every) for _ in range(rng.randrange(4, 14))) + rng.choice(".?!,"),
            lambda: f"{self.name(rng).title()} and {self.name(rng).title()} {of('did')} a {noun()} and the {noun()}.",
        )
        return rng.choice(forms)()
