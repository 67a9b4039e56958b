"""Training rows for the recall model: chats in which facts are told and asked for; knows the tokenizer and no model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from evalkit.retention.recall_words import Words

SPECIALS = ("<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, USER, ASSISTANT, END = range(len(SPECIALS))
VOCABULARY = 3072
AGAIN = 0.3  # in rounds of rich values, the share of those of three tokens or more that say one twice
ANY = 0.4  # the share of values that are tokens in no order, so that every token is met as part of one; or pieces of filler
MEMORY, LEAST = 0.1, 0.1  # the weight of the newest answer to a fact, and the chance to be drawn of one that is always right
LONGEST = 8192  # the last position that training shows
FILLER = (0.25, 0.4, 0.6)  # the share of a row that is filler
EARLY = (0.0, 0.0, 0.1, 0.4)  # the share of the filler that comes before the facts
OTHERS = (0, 0, 0, 0, 0, 1)  # how many of the other facts a chat hears too
GENERAL = 0.25  # the share of facts of the form "my <key> is <value>"

Asked = tuple[list[int], list[bool]]  # token ids, and which of them are answers


class Row(NamedTuple):
    """A row to train on: token ids, which are answers, their positions, the parts they belong to, which parts each part sees, and by
    their numbers the facts that are asked for, -1 for what is none of those written."""

    ids: list[int]
    answers: list[bool]
    positions: list[int]
    parts: list[int]
    sees: list[set[int]]
    asked: list[int]


@dataclass(frozen=True)
class Template:
    """A fact with a gap `{v}` for its value, the form of that value, and the questions that ask for it."""

    statement: str
    reply: str
    questions: tuple[str, ...]
    form: str


def templates(facts: list[dict[str, Any]]) -> list[Template]:
    """The facts with a gap where their first answer is."""
    gap = lambda fact: fact["statement"].replace(fact["answers"][0], "{v}")  # noqa: E731
    return [Template(gap(fact), fact["acknowledgement"], tuple(fact["questions"]), fact["answers"][0]) for fact in facts]


def read_facts(path: Path) -> list[dict[str, Any]]:
    """The facts of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of 3072 lower-case pieces in which every digit is a token and a text begins as if after a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Prepend(" "), normalizers.Replace(Regex("^ +"), " ")]
    )
    words = pre_tokenizers.Split(Regex(r" ?\d| ?\p{L}+| ?[^\s\d\p{L}]+|\s"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def replaced(ids: list[int], part: list[int], other: list[int]) -> list[int]:
    """The tokens with `other` where `part` is first."""
    start = next(start for start in range(len(ids)) if ids[start : start + len(part)] == part)
    return [*ids[:start], *other, *ids[start + len(part) :]]


class Rows:
    """Makes rows of a given length from templates, word lists and filler; every draw comes from the generator it is given."""

    def __init__(self, tokenizer: Tokenizer, words: Words, facts: list[Template], filler: list[str]) -> None:
        self.tokenizer, self.words, self.facts = tokenizer, words, facts
        self.filler = [coded.ids for coded in tokenizer.encode_batch(filler)]
        self.numbers = {template: number for number, template in enumerate(facts)}
        self.wrong: list[float] | None = None  # how often each fact was answered wrongly of late, if that is to be looked at
        self.rich = 0.0  # the share of tokens for a value that are a piece of filler, and more of what `Words.value` calls rich

    def read(self, prose: list[str]) -> None:
        """Have filler that is mostly prose."""
        self.filler = self.filler[: len(prose) * 2 // 3] + [coded.ids for coded in self.tokenizer.encode_batch(prose)]

    def learn(self, number: int, right: bool) -> None:
        """Note how a fact was answered: those that are answered wrongly are drawn more often."""
        if self.wrong is not None and number >= 0:
            self.wrong[number] += MEMORY * ((not right) - self.wrong[number])

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer.encode(text).ids

    def message(self, role: int, text: str) -> list[int]:
        """A message as the chat template writes it."""
        return [role, *self.encode(text), END]

    def fact(self, template: Template, rng: random.Random) -> tuple[list[int], Asked]:
        """A fact with a new value: the two messages that tell it; and the question with its answer, the answer marked."""
        text = self.words.value(template.form, rng, self.rich)
        told, value = self.message(USER, template.statement.replace("{v}", text)), self.encode(text)
        if rng.random() < ANY:
            other = self.tokens(rng.randint(1, 6), rng)
            told, value = replaced(told, value, other), other
        told += self.message(ASSISTANT, template.reply if rng.random() < 0.5 else rng.choice(self.words["replies"]))
        question = [*self.message(USER, rng.choice(template.questions)), ASSISTANT]
        answer = [*value, END]
        return told, (question + answer, [False] * len(question) + [True] * len(answer))

    def tokens(self, count: int, rng: random.Random) -> list[int]:
        """A value of so many tokens at most: in no order, or a piece of filler, which may be met elsewhere and go on otherwise there; where
        values are rich, some say a token twice, which may go on otherwise the second time.
        """
        if self.rich and rng.random() < self.rich:  # earlier rounds draw nothing here, so that their rows stay what they were
            sentence = rng.choice(self.filler)
            start = rng.randrange(max(1, len(sentence) - count))
            found = sentence[start : start + count]
        else:
            found = [rng.randrange(END + 1, VOCABULARY) for _ in range(count)]
        if self.rich and len(found) > 2 and rng.random() < AGAIN:
            again = rng.randrange(2, len(found))
            found[again] = found[rng.randrange(again - 1)]
        return found

    def drawn(self, count: int, rng: random.Random) -> list[Template]:
        """Different templates: most of the written facts, some of the general form."""
        general = sum(rng.random() < GENERAL for _ in range(count))
        keys = rng.sample(self.words["keys"], min(general, len(self.words["keys"])))
        both = [*self.written(min(count - general, len(self.facts)), rng), *(self.general(key, rng) for key in keys)]
        return rng.sample(both, len(both))

    def written(self, count: int, rng: random.Random) -> list[Template]:
        """Different facts of those written."""
        if self.wrong is None:
            return rng.sample(self.facts, count)
        luck = [rng.random() ** (1 / (LEAST + wrong)) for wrong in self.wrong]
        return [self.facts[number] for number in sorted(range(len(luck)), key=luck.__getitem__)[-count:]] if count else []

    def general(self, key: str, rng: random.Random) -> Template:
        """A fact of the form "my <key> is <value>"."""
        statement, *questions = (
            text.replace("{k}", key) for text in (rng.choice(self.words["statements"]), *self.words["questions"])
        )
        return Template(statement, "Okay.", tuple(questions), "word")

    def turn(self, limit: int, rng: random.Random) -> list[int]:
        """A user's message and a reply of filler, at most `limit` tokens."""
        pieces = lambda most: [token for _ in range(rng.randint(1, most)) for token in rng.choice(self.filler)]  # noqa: E731
        user = [USER, *pieces(2)[:60], END]
        return [*user, ASSISTANT, *pieces(6), END][:limit]

    def filling(self, count: int, rng: random.Random) -> list[int]:
        """So many tokens of filler, in turns."""
        found: list[int] = []
        while len(found) < count:
            found += self.turn(count - len(found), rng)
        return found

    def chats(self, length: int, rng: random.Random) -> Row:
        """Many chats in one row of `length` tokens: they share BOS and filler, and each tells a fact and asks for it at its end.

        Parts: filler before the facts, filler after them, then of each chat its telling and its asking. A few chats also hear others'
        facts. Positions are those that each chat has alone, but for leaps at users' messages, so that short rows show far distances.
        """
        told, asked, facts, room, least = [], [], [], length - 1, length * rng.choice(FILLER)
        for template in self.drawn(length // 40, rng):
            telling, (asking, marks) = self.fact(template, rng)
            if room - len(telling) - len(asking) < least:
                break
            room -= len(telling) + len(asking)
            told.append(telling)
            asked.append((asking, marks))
            facts.append(self.numbers.get(template, -1))
        before = [BOS, *self.filling(int(room * rng.choice(EARLY)), rng)]
        after = self.filling(room + 1 - len(before), rng)
        told_at = len(before)
        after_at = told_at + max((len(telling) for telling in told), default=0)
        leap = rng.random() * (LONGEST - length) if rng.random() < 0.6 else 0.0
        places = leaping(after, after_at, leap, rng)
        asked_at = int(after_at + len(after) + leap)
        row = Row([*before, *chain.from_iterable(told), *after], [], [*range(told_at)], [0] * told_at, [{0}, {0, 1}], facts)
        for number, telling in enumerate(told):
            row.positions.extend(range(told_at, told_at + len(telling)))
            row.parts.extend([2 + 2 * number] * len(telling))
        row.positions.extend(places)
        row.parts.extend([1] * len(after))
        row.answers.extend([False] * len(row.ids))
        for number, (asking, marks) in enumerate(asked):
            row.ids.extend(asking)
            row.answers.extend(marks)
            row.positions.extend(range(asked_at, asked_at + len(asking)))
            row.parts.extend([3 + 2 * number] * len(asking))
            own, others = 2 + 2 * number, rng.sample(range(len(told)), min(len(told), rng.choice(OTHERS)))
            row.sees.extend([{0, own}, {0, 1, own, own + 1, *(2 + 2 * other for other in others)}])
        return row

    def copies(self, length: int, rng: random.Random) -> Row:
        """Runs of random tokens, each repeated: every token is met as something to copy."""
        ids, marks = [BOS], [False]
        while len(ids) < length:
            run = [rng.randrange(END + 1, VOCABULARY) for _ in range(rng.randint(4, 24))]
            ids += run * 2
            marks += [False] * (len(run) + 1) + [True] * (len(run) - 1)
        starts = sum(marks[place] and not marks[place - 1] for place in range(1, length))
        return Row(ids[:length], marks[:length], [*range(length)], [0] * length, [{0}], [-1] * starts)


def leaping(ids: list[int], start: int, leap: float, rng: random.Random) -> list[int]:
    """Positions from `start` on that leap ahead at users' messages, by `leap` in all at most."""
    starts = [place for place, token in enumerate(ids) if token == USER]
    shares = {place: rng.expovariate(1) for place in starts}
    found, ahead = [], 0.0
    for place in range(len(ids)):
        ahead += leap * shares.get(place, 0) / sum(shares.values()) if shares else 0
        found.append(start + place + int(ahead))
    return found


def masks(rows: Sequence[Row]) -> Tensor:
    """[B, 1, T, T] what each token of the rows sees: what lies before it, of the parts that its part sees."""
    found = []
    for row in rows:
        sees = torch.zeros(len(row.sees), len(row.sees), dtype=torch.bool)
        for part, seen in enumerate(row.sees):
            sees[part, list(seen)] = True
        parts = torch.tensor(row.parts)
        found.append(sees[parts[:, None], parts[None]].tril())
    return torch.stack(found)[:, None]
