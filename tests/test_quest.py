"""Quest: the pages that queries read, against a slow twin and the authors' code, and what they cost."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evalkit.cache import LayerCache
from evalkit.contract import run
from evalkit.entries import ELEMENT_BYTES
from evalkit.layer import Layer
from evalkit.model import tiny
from evalkit.policies import build
from evalkit.session import Engine
from evalkit.shares import READ
from evalkit.trial import Trial, documents
from tests.authors.recording.tensors import drawn
from tests.references.quest import read
from tests.tiny import model

CASES = json.loads((Path(__file__).parent / "authors" / "quest.json").read_text())["cases"]
HEADS, GROUP, SIZE = 2, 3, 6


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def taken_in(policy, cache, keys):
    """The cache after a block of keys [B, H, T, D]."""
    return policy.observe(cache.append(keys, keys), keys[:, :, None])


def sequences(policy, layer, keys, lengths):
    """Caches of each sequence's first `lengths` keys [B, H, T, D], in two blocks, side by side."""
    caches = []
    for own, length in zip(keys, lengths, strict=True):
        cache = LayerCache.empty(layer, own[None], 1)
        for start, stop in ((0, length // 3), (length // 3, length)):
            cache = taken_in(policy, cache, own[None, :, start:stop]) if stop > start else cache
        caches.append(cache)
    return LayerCache.stack(caches)


@pytest.mark.parametrize("window", [None, 5, 14])
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("knobs", [{}, {"per_query_head": True}, {"newest": True}], ids=str)
def test_sequences_of_different_lengths_read_what_the_twin_reads(page, window, knobs):
    policy = build("quest", 12, page=page, **knobs)
    keys, lengths, allowance = random(3, HEADS, 60, SIZE, seed=page), [1, 20, 37], torch.tensor([17, 9, 3])
    cache = replace(sequences(policy, Layer(index=2, window=window), keys, lengths), allowance=allowance)
    for step in range(20):
        assert cache.notes["bounds"].isfinite().all()
        query = random(3, HEADS, GROUP, 1, SIZE, seed=100 + step)
        mask = (policy.read(cache, query) & cache.reach(cache.seen[:, None])).expand(3, HEADS, GROUP, 1, -1)
        for row, length in enumerate(lengths):
            own, now = keys[row, :, : length + step], query[row, :, :, 0]
            grant = int(allowance[row])
            twin = read(now.numpy(), own.numpy(), page=page, allowance=grant, window=window, **knobs)
            places = [cache.positions[row, 0, slot] for slot in range(cache.slots)]
            got = {(h, g, int(places[s])) for h, g, s in mask[row, :, :, 0].nonzero().tolist()}
            assert got == {tuple(map(int, where)) for where in zip(*twin.nonzero(), strict=True)}
        cache = taken_in(policy, cache, torch.stack([keys[row, :, n + step, None] for row, n in enumerate(lengths)])).expired()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_bounds_pages_and_output_are_the_authors(case):
    query, keys, values = drawn(case["inputs"], torch.float64)
    parameters = case["parameters"]
    policy = build("quest:repo", parameters["token_budget"], page=parameters["chunk_size"])
    layer = Layer(index=2, scaling=query.shape[2] ** -0.5)
    cache = LayerCache.empty(layer, keys[None], 1).append(keys[None], values[None])
    cache = replace(policy.observe(cache, query[None]), allowance=torch.tensor([parameters["token_budget"]]))
    newest = query[None, :, parameters["query"]].view(1, len(keys), -1, 1, query.shape[2])
    mask = policy.read(cache, newest)
    output = layer.attention(newest, keys[None], mask)[:, :, :, 0] @ values
    assert ["".join("01"[entry] for entry in head) for head in mask.flatten(0, 3).tolist()] == case["expected"]["read"]
    for ours, name in ((policy.scores(cache, newest), "bounds"), (output, "output")):
        theirs = torch.tensor(case["expected"][name], dtype=torch.float64)
        torch.testing.assert_close(ours.flatten(0, 2), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "knobs"),
    [("llama", {"page": 4}), ("mistral", {"page": 5}), ("gemma2", {"page": 4, "dense_layers": 0}), ("gpt_oss", {"page": 3})],
)
def test_it_keeps_the_contract_with_small_pages_and_sliding_windows(family, knobs):
    trial = Trial(lambda budget: build("quest", budget, **knobs), model(family))
    assert [finding for finding in run(trial) if not finding.passed] == []


def test_query_heads_that_choose_for_themselves_are_counted_by_their_union():
    engine, some = Engine(tiny()), documents()[:1]
    policies = [build("quest", "20%", page=4), build("quest:per_query_head", "20%", page=4), build("full")]
    together, apart, full = (float(result.tally[READ].sum()) for result in engine.score(some, policies))
    assert together < apart < full


def test_a_budget_below_one_page_reads_one():
    policy = build("quest", "1%")
    cache = replace(sequences(policy, Layer(index=2), random(1, HEADS, 48, SIZE, seed=1), [48]), allowance=torch.tensor([1]))
    read = policy.read(cache, random(1, HEADS, GROUP, 1, SIZE, seed=2))
    assert read.sum(-1).flatten().tolist() == [policy.floor] * HEADS == [16, 16]


def test_it_acts_on_prompts_of_more_pages_than_it_reads():
    assert [build("quest", "10%").acts_on(tokens) for tokens in (16, 17)] == [False, True]
    assert [build("quest:repo", "10%").acts_on(tokens) for tokens in (48, 49)] == [False, True]
    assert not build("quest", "100%").acts_on(1000)


def test_the_first_layers_are_dense_and_keep_no_bounds():
    policy, keys = build("quest", "10%"), random(1, HEADS, 40, SIZE, seed=3)
    for index, dense in ((0, True), (1, True), (2, False)):
        cache = replace(sequences(policy, Layer(index=index), keys, [40]), allowance=torch.tensor([4]))
        assert (policy.read(cache, keys[:, :, None, :1]) is None) == dense
        assert ("bounds" in cache.notes) != dense


def test_bounds_count_in_the_bytes_held():
    policy = build("quest", "10%")
    held = sequences(policy, Layer(index=2), random(1, HEADS, 40, SIZE, seed=4), [40])
    pages = 3
    assert int(held.cost()) == HEADS * (40 + pages) * 2 * SIZE * ELEMENT_BYTES
