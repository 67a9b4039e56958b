"""Policies hold, score and give what the authors' own code was recorded to; twins too, where a policy has no such settings."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from evalkit.cache import LayerCache
from evalkit.counters import Counters
from evalkit.decoding import Wave
from evalkit.kernels import rotated
from evalkit.layer import Layer
from evalkit.memory import Block, Branch, Cell, Grants, State
from evalkit.policies import build, find
from evalkit.policy import Budget, Policy, last, top
from evalkit.row import Row
from tests.authors.recording.tensors import drawn
from tests.references import h2o, snapkv, streaming_llm, tova

AUTHORS = Path(__file__).parent / "authors"
H2O, StreamingLLM = find("h2o"), find("streaming_llm")


def cases(name):
    """The cases of a fixture, by their names."""
    return {case["name"]: case for case in json.loads((AUTHORS / f"{name}.json").read_text())["cases"]}


def each(name, which=lambda case: True):
    return pytest.mark.parametrize("case", list(filter(which, cases(name).values())), ids=lambda case: case["name"])


def rope(size):
    return 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)


def turned(tensor):
    """Queries or keys [heads, tokens, size] rotated to their places."""
    places = torch.arange(tensor.shape[1]).expand(1, *tensor.shape[:2])
    return rotated(tensor[None], places, rope(tensor.shape[2]))[0]


class Driven:
    """One layer under a policy, call by call: what is held, noted and given after each."""

    def __init__(self, policy, case, *, turning=False, repeated=False):
        queries, keys, values = drawn(case["inputs"], torch.float64)
        if repeated:  # the authors' code repeats keys and values for each query head
            keys, values = (side.repeat_interleave(len(queries) // len(side), 0) for side in (keys, values))
        self.facts = Layer(scaling=1 / math.sqrt(keys.shape[2]), rope=rope(keys.shape[2]) if turning else None)
        self.queries, self.keys, self.values = (*map(turned, (queries, keys)), values) if turning else (queries, keys, values)
        self.cell, self.state = Cell(policy), State(lasting=True)
        self.caches, self.outputs = [], []
        prompt = case["parameters"].get("prompt", queries.shape[1])
        self.call(0, prompt)
        for token in range(prompt, queries.shape[1]):
            self.call(token, token + 1)

    def call(self, start, stop):
        index = torch.arange(stop - start)[None]
        if start == 0:
            job = Block(index, stop, [Branch(self.cell, Grants([(self.cell.policy.budget, stop)]), [0], self.state)])
        else:
            job = Wave(index, [1], self.cell, [0], [(State(dict(self.state.caches)), None)], completes=1, state=self.state)
        now = (side[None, :, start:stop] for side in (self.queries, self.keys, self.values))
        output = Row([job], Counters(), "eager").attend(self.facts, *now)
        self.caches.append(self.state.caches[0])
        self.outputs.append(output[0, -1])

    @property
    def kept(self):
        """What each head held after each call."""
        return [[row[row >= 0].tolist() for row in cache.positions[0]] for cache in self.caches]

    def marks(self, name):
        """A mark of what each head holds after the last call."""
        cache = self.caches[-1]
        return [row[places >= 0].tolist() for row, places in zip(cache.marks[name][0], cache.positions[0], strict=True)]


def close(one, other, tolerance=1e-4):
    """Nested lists of numbers agree."""
    torch.testing.assert_close(
        torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


def walked(twin, case, calls, *, turning=False, repeated=False, **settings):
    """What a twin holds after each call of a case, and its outputs after the calls."""
    driven = Driven(Policy(), case, turning=turning, repeated=repeated)
    group = len(driven.queries) // len(driven.keys)
    queries = driven.queries.unflatten(0, (len(driven.keys), group)).tolist()
    facts = {"scaling": driven.facts.scaling, **settings}
    history, outputs = twin.kept(queries, driven.keys.tolist(), driven.values.tolist(), calls, **facts)
    ends = [sum(count for count, _ in calls[: i + 1]) - 1 for i in range(len(calls))]
    return history, [[row for head in outputs[end] for row in head] for end in ends]


def calls(case, told):
    """The prompt, then token by token, each followed by an eviction."""
    prompt, total = case["parameters"]["prompt"], case["inputs"]["keys"]["shape"][1]
    return [(prompt, told), *[(1, told)] * (total - prompt)]


# H2O


@dataclass(frozen=True, kw_only=True)
class Split(H2O):
    """H2O with any split into heavy hitters and recent tokens; its own is half and half."""

    heavy: int
    recent: int
    every_step: bool = True

    def evict(self, cache: LayerCache, query: torch.Tensor) -> LayerCache:
        near = last(cache, self.recent)
        return cache.keep(near | top(cache.marks["received"], self.heavy, cache.filled & ~near))


@dataclass(frozen=True, kw_only=True)
class Rerotated(Split):
    """The authors' streaming H2O: positions are places in the cache."""

    def place(self, cache: LayerCache) -> torch.Tensor | None:
        return StreamingLLM().place(cache)


def split(case):
    return {"heavy": case["parameters"]["hh_size"], "recent": case["parameters"]["recent_size"]}


def test_h2o_by_halves_is_the_authors_real_drop():
    case = cases("h2o_real_drop")["heavy 3 recent 4 prompt 12"]
    driven = Driven(build("h2o:paper", 7), case)
    assert driven.kept == case["expected"]["kept"]
    close(driven.marks("received"), case["expected"]["last_scores"])
    close(torch.stack(driven.outputs), case["expected"]["outputs"])


@pytest.mark.parametrize("name", ["h2o_real_drop", "h2o_streaming"])
def test_h2o_with_other_splits_is_the_authors_real_drop(name):
    kind, turning = (Rerotated, True) if name == "h2o_streaming" else (Split, False)
    for case in cases(name).values():
        driven = Driven(kind(**split(case)), case, turning=turning)
        assert driven.kept == case["expected"]["kept"], case["name"]
        close(driven.marks("received"), case["expected"]["last_scores"])
        close(torch.stack(driven.outputs), case["expected"]["outputs"])


@each("h2o_real_drop")
def test_the_twin_of_h2o_is_the_authors_real_drop(case):
    kept, outputs = walked(h2o, case, calls(case, (split(case)["recent"], split(case)["heavy"])))
    assert kept == case["expected"]["kept"]
    close(outputs, case["expected"]["outputs"])


@dataclass(frozen=True, kw_only=True)
class HiddenForAStep(Split):
    """The authors' decoding mask: what has just left the recent part is hidden for one step, then it may come back."""

    def observe(self, cache: LayerCache, query: torch.Tensor) -> LayerCache:
        cache = super().observe(cache, query)
        if cache.slots <= self.heavy + self.recent:
            return cache.mark("shown", cache.filled)
        received, old = cache.marks["received"], ~last(cache, self.recent)
        heavy = top(received, self.heavy, cache.filled & old)
        shown = heavy | last(cache, self.recent - 1)
        return cache.mark("received", received * (heavy | ~old)).mark("shown", shown)

    def read(self, cache: LayerCache, query: torch.Tensor) -> torch.Tensor | None:
        return cache.marks["shown"][:, :, None, None]

    def evict(self, cache: LayerCache, query: torch.Tensor) -> LayerCache:
        return cache


@each("h2o_decoding", lambda case: case["parameters"]["recent_ratio"] > 0)  # else the newest token does not see itself
def test_the_authors_decoding_mask_is_a_policy_too(case):
    parameters, expected = case["parameters"], case["expected"]
    heavy, recent = (int(parameters[f"{part}_ratio"] * parameters["prompt"]) for part in ("heavy", "recent"))
    driven = Driven(HiddenForAStep(heavy=heavy, recent=recent), case)
    for cache, seen, scores in zip(driven.caches, expected["seen"][1:], expected["scores"][:-1], strict=False):
        assert [[*row.tolist(), True] for row in cache.marks["shown"][0]] == [[bit == "1" for bit in row] for row in seen]
        close(cache.marks["received"][0], scores)


# The others


@each("snapkv")
def test_snapkv(case):
    parameters, total = case["parameters"], case["inputs"]["keys"]["shape"][1]
    size, window = parameters["max_capacity_prompt"], parameters["window_size"]
    smoothing = {"kernel": parameters["kernel_size"], "pooling": parameters["pooling"].removesuffix("pool")}
    sets = walked(snapkv, case, [(total, (size, window))], repeated=True, **smoothing)[0]
    if window <= (size + 1) // 2:  # ours shrinks to half of the allowance
        sets += Driven(build("snapkv", size, window=window, **smoothing), case, repeated=True).kept
    for kept in sets:
        for head, wanted in enumerate(case["expected"]["kept"]):
            if case["expected"]["tied"][head]:  # then only the sum of what is kept is certain
                scores = case["expected"]["scores"][head]
                mine = [scores[p] for p in kept[head] if p < len(scores)]
                assert sum(mine) == pytest.approx(sum(sorted(scores, reverse=True)[: len(mine)]), abs=1e-4)
            else:
                assert kept[head] == wanted


@each("tova")
def test_tova(case):
    size, expected = case["parameters"]["cache_size"], case["expected"]
    driven = Driven(find("tova")(budget=Budget(None, size)), case)
    kept, outputs = walked(tova, case, calls(case, size))
    for one in (driven.kept, kept):
        assert all(head == wanted for heads, wanted in zip(one, expected["kept"], strict=True) for head in heads)
    close(torch.stack(driven.outputs), expected["outputs"])
    close(outputs, expected["outputs"])


@each("streaming_llm")
def test_streaming_llm(case):
    sinks, size = case["parameters"]["start_size"], case["parameters"]["start_size"] + case["parameters"]["recent_size"]
    driven = Driven(build("streaming_llm", size, sinks=sinks), case, turning=True)
    frequencies = rope(case["inputs"]["keys"]["shape"][2]).tolist()
    kept, outputs = walked(streaming_llm, case, calls(case, size), turning=True, sinks=sinks, frequencies=frequencies)
    for one in (driven.kept, kept):
        assert all(head == wanted for heads, wanted in zip(one, case["expected"]["kept"], strict=True) for head in heads)
    close(torch.stack(driven.outputs), case["expected"]["outputs"])
    close(outputs, case["expected"]["outputs"])


KVPRESS = {
    "knorm": lambda given: {},
    "tova:kvpress": lambda given: {},
    "snapkv": lambda given: {"window": given["window_size"], "kernel": given["kernel_size"]},
    "streaming_llm:kvpress": lambda given: {"sinks": given.get("n_sink", 4)},
}


@pytest.mark.parametrize("name", KVPRESS)
def test_kvpress_keeps_the_same(name):
    for case in cases(f"kvpress_{name.partition(':')[0]}").values():
        wanted = case["expected"]["kept"]
        driven = Driven(build(name, len(wanted[0]), **KVPRESS[name](case["parameters"])), case)
        assert driven.kept == [wanted], case["name"]
