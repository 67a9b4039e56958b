"""What policies hold and what attention gives, layer by layer and head by head, against their slow twins."""

import math
from fractions import Fraction
from unittest.mock import patch

import pytest
import torch

from evalkit.documents import Document
from evalkit.model import tiny as tiny_llama
from evalkit.policies import build
from evalkit.row import Row
from evalkit.session import Engine
from tests import tiny
from tests.references import h2o, knorm, snapkv, streaming_llm, tova

SHARE = Fraction(3, 10)
MODEL = tiny_llama(3)


class Recorded:
    """A session's layers: queries, keys and values as they came, outputs, and what was held after each message."""

    def __init__(self, policy, protocol="prompt", model=MODEL):
        self.session = Engine(model).open(policy, protocol)
        self.layers, self.history, self.places = {}, [], []

    def feed(self, count, *, decoded=False):
        """Take in so many tokens as a message."""
        return self.noting(lambda: self.session.feed(tiny.tokens(count, 60 + len(self.history)), decoded=decoded))

    def say(self, count):
        """Decode a reply of so many tokens."""
        for _ in range(count - 1):
            self.noting(lambda: self.session.generate(1, lambda said: False))
        return self.noting(lambda: (self.session.generate(1, lambda said: False), self.session.conclude()))

    def noting(self, act):
        attend = Row.attend

        def watched(row, layer, query, keys, values):
            row.asked = None  # the last layer's outputs are wanted, too, of tokens whose prediction nobody reads
            output = attend(row, layer, query, keys, values)
            self.layers.setdefault(layer.index, {})[self.session.seen] = (layer, query, keys, values, output)
            return output

        with patch.object(Row, "attend", watched):
            act()
        self.history.append([positions(held) for held in self.session.caches])
        self.places.append(self.session.seen)
        return self

    def layer(self, index):
        """One layer's facts, its queries [H, G, T, D], keys and values [H, T, D] and outputs [T, H, G, D], as nested lists."""
        facts, queries, keys, values, outputs = zip(*self.layers[index].values(), strict=True)
        keys, values = torch.cat(keys, 2)[0], torch.cat(values, 2)[0]
        queries, outputs = torch.cat(queries, 2)[0].unflatten(0, (len(keys), -1)), torch.cat(outputs, 1)[0]
        return facts[0], queries.tolist(), keys.tolist(), values.tolist(), outputs.unflatten(1, (len(keys), -1))


def positions(held):
    """The positions that each head of a layer holds."""
    return [row[row >= 0].tolist() for row in held.positions.where(held.filled, -1)[0]]


def allowance(tokens, window=None):
    return max(1, math.floor(SHARE * (tokens if window is None else min(tokens, window))))


def compare(recorded, twin, calls, told, **settings):
    """Hold every layer against the twin's walk through `calls`, pairs of tokens and the tokens that the budget is a share of."""
    for index in sorted(recorded.layers):
        facts, queries, keys, values, outputs = recorded.layer(index)
        grants = [(count, None if basis is None else told(allowance(basis, facts.window))) for count, basis in calls]
        more = {name: value(facts) if callable(value) else value for name, value in settings.items()}
        history, expected = twin.kept(queries, keys, values, grants, scaling=facts.scaling, window=facts.window, **more)
        ends = {sum(count for count, _ in calls[: i + 1]): held for i, held in enumerate(history)}
        for place, noted in zip(recorded.places, recorded.history, strict=True):
            assert noted[index] == ends[place], f"layer {index} after {place} tokens"
        torch.testing.assert_close(outputs, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def split(allowed):
    return h2o.halves(allowed)


def voters(window):
    return lambda allowed: (allowed, min(window, (allowed + 1) // 2))


def frequencies(facts):
    return facts.rope.tolist()


TWINS = {
    "h2o": (h2o, split, {}),
    "h2o:paper": (h2o, split, {}),
    "tova": (tova, int, {}),
    "tova:kvpress": (tova, int, {"keep_newest": True}),
    "knorm": (knorm, int, {}),
    "knorm:every-step": (knorm, int, {}),
    "streaming_llm": (streaming_llm, int, {"sinks": 4, "frequencies": frequencies}),
    "streaming_llm:original": (streaming_llm, int, {"sinks": 4}),
    "streaming_llm:kvpress": (streaming_llm, int, {"sinks": 4}),
}
EVERY_STEP = {"h2o:paper", "tova", "knorm:every-step", "streaming_llm", "streaming_llm:original"}


@pytest.mark.parametrize("name", TWINS)
def test_a_conversation_holds_what_the_twin_holds(name):
    twin, told, settings = TWINS[name]
    recorded = Recorded(build(name, "30%")).feed(31).say(4).feed(7, decoded=True).feed(12)
    said, replayed = (30, 34) if name in EVERY_STEP else (None, None)  # a reply goes on under what was granted before it
    calls = [(30, 30), *[(1, said)] * 3, (1, 34), *[(1, replayed)] * 6, (1, 41), (12, 53)]
    compare(recorded, twin, calls, told, **settings)


@pytest.mark.parametrize("name", TWINS)
def test_a_stream_holds_what_the_twin_holds(name):
    twin, told, settings = TWINS[name]
    recorded = Recorded(build(name, "30%"), "stream").feed(31).say(4)
    compare(recorded, twin, [*[(1, 30)] * 33, (1, 34)], told, **settings)


@pytest.mark.parametrize("family", ["mistral", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("name", ["h2o:paper", "tova", "streaming_llm"])
def test_windows_and_partly_rotated_heads_change_what_is_held_as_in_the_twin(name, family):
    twin, told, settings = TWINS[name]
    with tiny.exact():
        recorded = Recorded(build(name, "30%"), model=tiny.model(family)).feed(21).say(5)
        compare(recorded, twin, [(20, 20), *[(1, 20)] * 4, (1, 25)], told, **settings)


@pytest.mark.parametrize("preset", ["snapkv", "snapkv:longbench", "snapkv:kvpress"])
def test_snapkv_keeps_what_the_twin_keeps(preset):
    policy = build(preset, "30%")
    recorded = Recorded(policy).feed(61).say(3).feed(20)
    calls = [(60, 60), *[(1, None)] * 3, (20, 83)]
    compare(recorded, snapkv, calls, voters(policy.window), kernel=policy.kernel, pooling=policy.pooling)


def test_snapkv_with_a_window_shorter_than_half_the_allowance_keeps_what_the_twin_keeps():
    recorded = Recorded(build("snapkv", "30%", window=4, kernel=3)).feed(61)
    compare(recorded, snapkv, [(60, 60)], voters(4), kernel=3, pooling="avg")


# Random has no twin: what can be said of it is how it draws


def drawn(budget="30%", **knobs):
    recorded = Recorded(build("random", budget, **knobs)).feed(101)
    return recorded.history[-1]


def test_random_draws_the_same_again_and_other_entries_for_other_seeds_layers_and_heads():
    assert drawn() == drawn()
    sets = [tuple(head) for seed in (0, 1) for layer in drawn(seed=seed) for head in layer]
    assert len(set(sets)) == len(sets)


def test_random_keeps_what_it_kept_at_a_smaller_budget():
    for small, large in zip(drawn("10%"), drawn("50%"), strict=True):
        assert all(set(few) < set(many) for few, many in zip(small, large, strict=True))


def test_random_spares_no_place():
    counts = [0] * 100
    for seed in range(40):
        for layer in drawn(seed=seed):
            for head in layer:
                for position in head:
                    counts[position] += 1
    mean = sum(counts) / len(counts)  # 240 draws of 30 in 100: 72 each, with a deviation of 7.1
    assert mean == 72
    assert max(abs(count - mean) for count in counts) < 4.5 * 7.1
    halves = [sum(counts[start : start + 50]) / 50 for start in (0, 50)]
    assert abs(halves[0] - halves[1]) < 4.5 * 7.1 * math.sqrt(2 / 50)


def test_random_is_the_same_in_every_batch():
    """Whatever rows a sequence steps with, its entries are drawn by where they stand in it."""
    engine, policy = Engine(MODEL), build("random:every-step", "30%")
    documents = [Document(tiny.tokens(length, length), (tiny.tokens(4, 1),)) for length in (40, 17, 5)]
    together = engine.score(documents, [policy], "stream")[0].scores
    alone = [engine.score([document], [policy], "stream")[0].scores[0] for document in documents]
    for one, other in zip(together, alone, strict=True):
        assert one[0].logprob == pytest.approx(other[0].logprob, abs=1e-9)
