"""A layer's cache is a value: what was taken in, kept, stacked or forked reads as it should, and no older one changes."""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from evalkit import cache as module
from evalkit import masks
from evalkit.cache import EMPTY, LayerCache
from evalkit.entries import Plain
from evalkit.layer import Layer

HEADS, GROUP, SIZE = 2, 3, 4


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(batch, count, seed):
    """Keys and values [B, H, T, D]."""
    return drawn(batch, HEADS, count, SIZE, seed=seed), drawn(batch, HEADS, count, SIZE, seed=seed + 1)


def taken(count, *, batch=1, seed=0, layer=None):
    """A cache that has taken in so many tokens."""
    keys, values = pair(batch, count, seed)
    return LayerCache.empty(layer or Layer(), keys, batch).append(keys, values)


def held(cache):
    """What each head of each sequence holds: {position: (key, value)}."""
    keys, values = cache.entries.dense()
    return [
        [
            {int(p): (keys[b, h, s].tolist(), values[b, h, s].tolist()) for s, p in enumerate(places[h]) if cache.filled[b, h, s]}
            for h in range(HEADS)
        ]
        for b, places in enumerate(cache.positions)
    ]


def wanted(cache, seed):
    """A mask of about half of what each head holds."""
    return drawn(*cache.positions.shape, seed=seed) < 0


# The arena


@pytest.mark.parametrize("seed", range(30))
def test_no_view_of_an_arena_ever_changes(seed):
    """Views grow, fork, are parted and stacked at random; each is compared with a copy made when it came about."""
    draw = random.Random(seed)
    keys, values = pair(2, draw.randrange(4), seed)
    views = [(Plain.of(keys, values), keys.clone(), values.clone())]
    for step in range(25):
        view, keys, values = draw.choice(views)
        act = draw.choice(["append", "append", "append", "take", "rows", "stack"])
        if act == "append":
            more = pair(2, draw.randrange(1, 4), 100 * seed + step)
            new = view.append(*more), torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2)
        elif act == "take" and keys.shape[2]:
            order = torch.randint(keys.shape[2], (2, HEADS, 3), generator=torch.Generator().manual_seed(step))
            index = order[..., None].expand(-1, -1, -1, SIZE)
            new = view.take(order), keys.gather(2, index), values.gather(2, index)
        elif act == "rows":
            index = draw.choice([slice(0, 2), torch.tensor([1, 0]), torch.tensor([1, 1])])
            new = view.rows(index), keys[index], values[index]
        else:
            one, other = view.rows(slice(0, 1)), view.rows(slice(1, 2))
            new = one.stack([one, other], [0, 0]), keys, values
        views.append(new)
        for one, expected_keys, expected_values in views:
            assert torch.equal(one.dense()[0], expected_keys)
            assert torch.equal(one.dense()[1], expected_values)


def test_a_view_that_grows_alone_is_not_copied():
    view = Plain.of(*pair(1, 4, 0)).append(*pair(1, 1, 2))
    grown = view.append(*pair(1, 1, 4))
    assert grown.dense()[0].data_ptr() == view.dense()[0].data_ptr()


def test_bytes_are_two_an_element_whatever_the_dtype():
    plain = Plain.of(*pair(2, 5, 0))
    assert plain.cost(torch.tensor([[5, 3], [0, 1]])).tolist() == [8 * 2 * SIZE * 2, 1 * 2 * SIZE * 2]


# Keeping and forgetting


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_keeping_leaves_each_head_its_own_entries_in_order(seed, decoding):
    before = replace(taken(12, batch=3, seed=seed), decoding=decoding, roomy=20 if decoding else 0)
    mask = wanted(before, seed)
    after = before.mark("worth", before.positions * 10).keep(mask)
    for b, rows in enumerate(held(before)):
        for h, entries in enumerate(rows):
            kept = {p: entry for p, entry in entries.items() if mask[b, h, p]}
            assert held(after)[b][h] == kept
            places = after.positions[b, h][after.filled[b, h]]
            assert places.tolist() == sorted(kept)
            assert after.marks["worth"][b, h][after.filled[b, h]].tolist() == [10 * p for p in sorted(kept)]
    assert after.counts.tolist() == mask.sum(-1).tolist()


def test_what_was_forgotten_cannot_be_kept_again():
    once = replace(taken(6), decoding=True, roomy=20)
    once = once.keep(once.positions < 3)
    assert once.keep(torch.ones_like(once.filled)).counts.tolist() == [[3, 3]]


def test_decoding_compacts_forgotten_slots_once_they_are_many():
    cache = taken(40)
    cache = cache.keep(cache.positions >= 30)
    widths = []
    for step in range(40):
        cache = cache.append(*pair(1, 1, step), decoding=True)
        cache = cache.keep(cache.positions >= 31 + step)
        widths.append(cache.slots)
        assert cache.counts.tolist() == [[10, 10]]
    assert max(widths) <= 10 + 10 // 4 + module.SLACK + 1
    assert min(widths) == 10


def test_keeping_everything_changes_nothing():
    cache = taken(7)
    assert cache.keep(cache.filled) is cache


# Windows


def test_a_window_passes_entries_by_position():
    cache = taken(9, layer=Layer(window=4))
    assert cache.counts.tolist() == [[4, 4]]
    assert cache.tokens.tolist() == [4]
    assert cache.positions[cache.filled].tolist() == [5, 6, 7, 8] * HEADS


@pytest.mark.parametrize("window", [None, 4])
def test_queries_see_what_came_before_them_within_the_window(window):
    cache = taken(9, batch=2, layer=Layer(window=window))
    seen = cache.visible(3).expand(2, HEADS, 1, 3, 9)
    for t, now in enumerate((6, 7, 8)):
        expected = [p <= now and (window is None or now - p < window) for p in range(9)]
        assert seen[:, :, 0, t].tolist() == [[expected] * HEADS] * 2
    assert torch.equal(cache.visible(3, 1, 2), cache.visible(3)[..., 1:2, :])


def test_each_head_sees_what_it_holds():
    cache = taken(6)
    mask = wanted(cache, 1)
    kept = cache.keep(mask).append(*pair(1, 1, 9))
    for h in range(HEADS):
        sight = kept.visible(1).expand(1, HEADS, 1, 1, -1)[0, h, 0, 0]
        assert kept.positions[0, h][sight].tolist() == [*mask[0, h].nonzero()[:, 0].tolist(), 6]


def test_entries_that_a_window_has_passed_are_dropped_once_they_are_many():
    cache = taken(5, layer=Layer(window=4))
    assert cache.expired() is cache
    many = taken(30, layer=Layer(window=4)).expired()
    assert (many.slots, many.positions[0, 0].tolist()) == (4, [26, 27, 28, 29])


# Attention


def layer(**facts):
    return Layer(scaling=0.7, **facts)


FACTS = [{}, {"softcap": 2.0}, {"window": 5}, {"sinks": drawn(HEADS, GROUP, seed=5)}, {"softcap": 2.0, "window": 3}]


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: "+".join(facts) or "plain")
def test_weights_are_a_softmax_over_what_is_seen(facts):
    cache, query = taken(8, layer=layer(**facts)), drawn(1, HEADS, GROUP, 8, SIZE, seed=3)
    keys = cache.entries.dense()[0]
    weights = cache.weights(query)
    for h in range(HEADS):
        for g in range(GROUP):
            for t in range(8):
                scores = (query[0, h, g, t] @ keys[0, h].T) * 0.7
                if "softcap" in facts:
                    scores = facts["softcap"] * torch.tanh(scores / facts["softcap"])
                powers = [float(s.exp()) if p <= t and t - p < facts.get("window", 99) else 0.0 for p, s in enumerate(scores)]
                spent = float(facts["sinks"][h, g].exp()) if "sinks" in facts else 0.0
                expected = [power / (sum(powers) + spent) for power in powers]
                assert weights[0, h, g, t].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("elements", [1, 60, 10_000])
@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: "+".join(facts) or "plain")
def test_attention_received_in_blocks_is_attention_received_at_once(facts, elements):
    cache, query = taken(8, batch=2, layer=layer(**facts)), drawn(2, HEADS, GROUP, 6, SIZE, seed=3)
    with patch.object(masks, "BLOCK_ELEMENTS", elements):
        received = cache.received(query)
    torch.testing.assert_close(received, cache.weights(query).sum(3), rtol=0, atol=1e-12)


def test_blocks_of_queries_keep_to_the_limit_where_they_can():
    cache = taken(8, batch=2)
    with patch.object(masks, "BLOCK_ELEMENTS", 300):
        sizes = [stop - start for start, stop in cache.blocks(8, GROUP)]
    assert sizes == [3, 3, 2]
    assert max(sizes) * cache.positions.numel() * GROUP <= 300


def test_half_precision_scores_are_made_in_single_precision():
    keys = drawn(1, HEADS, 5, SIZE).to(torch.bfloat16)
    cache = LayerCache.empty(layer(), keys, 1).append(keys, keys)
    assert cache.weights(drawn(1, HEADS, GROUP, 2, SIZE).to(torch.bfloat16)).dtype == torch.float32


# Sequences side by side


def test_stacked_sequences_read_as_each_alone():
    lengths = (3, 9, 6)
    alone = [taken(length, seed=length).mark("worth", drawn(1, HEADS, length, 2, seed=length)) for length in lengths]
    together = LayerCache.stack(alone)
    assert together.positions.shape == (3, HEADS, 9)
    assert (together.positions[0, :, :6] == EMPTY).all()
    assert together.seen.tolist() == list(lengths)
    for row, one in enumerate(alone):
        assert held(together)[row] == held(one)[0]
        again = together.rows(slice(row, row + 1))
        assert torch.equal(again.marks["worth"][:, :, -one.slots :], one.marks["worth"])
        new, query = pair(1, 1, 50), drawn(1, HEADS, GROUP, 1, SIZE, seed=51)
        grown, grown_alone = again.append(*new, decoding=True), one.append(*new, decoding=True)
        weights = grown.weights(query)
        torch.testing.assert_close(weights[..., -one.slots - 1 :], grown_alone.weights(query), rtol=0, atol=1e-12)
        assert not weights[..., : -one.slots - 1].any()


def test_stacking_pads_notes_behind_and_missing_marks_with_zeros():
    one = taken(2).note("pages", drawn(1, HEADS, 1, 3, seed=1))
    other = taken(4).note("pages", drawn(1, HEADS, 2, 3, seed=2)).mark("worth", drawn(1, HEADS, 4, seed=3))
    together = LayerCache.stack([one, other])
    assert torch.equal(together.notes["pages"][0, :, :1], one.notes["pages"][0])
    assert not together.notes["pages"][0, :, 1:].any()
    assert torch.equal(together.notes["pages"][1], other.notes["pages"][0])
    assert not together.marks["worth"][0].any()
    assert torch.equal(together.marks["worth"][1], other.marks["worth"][0])


def test_allowances_are_stacked_and_parted_with_their_sequences():
    caches = [replace(taken(n), allowance=torch.tensor([n])) for n in (2, 3)]
    together = LayerCache.stack(caches)
    assert together.allowance.tolist() == [2, 3]
    assert together.rows(torch.tensor([1])).allowance.tolist() == [3]


# Marks and bytes


def test_marks_travel_with_entries_and_start_at_zero():
    cache = taken(4).mark("worth", torch.arange(8.0).view(1, HEADS, 4))
    grown = cache.append(*pair(1, 2, 7))
    assert grown.marks["worth"].tolist() == [[[0, 1, 2, 3, 0, 0], [4, 5, 6, 7, 0, 0]]]
    assert cache.marks["worth"].shape == (1, HEADS, 4)
    kept = grown.keep(grown.positions % 2 == 0)
    assert kept.marks["worth"].tolist() == [[[0, 2, 0], [4, 6, 0]]]


def test_what_earlier_blocks_noted_is_taken_over():
    earlier = taken(3).mark("worth", torch.ones(1, HEADS, 3)).note("fact", torch.ones(1, 2))
    later = taken(5).remembering(earlier)
    assert later.marks["worth"].tolist() == [[[1, 1, 1, 0, 0]] * HEADS]
    assert later.notes["fact"].tolist() == [[1, 1]]


def test_bytes_count_entries_marks_and_notes():
    cache = taken(6, batch=2).mark("worth", torch.zeros(2, HEADS, 6, 3)).note("fact", torch.zeros(2, 10))
    kept = cache.keep(cache.positions < torch.tensor([4, 6])[:, None, None])
    entry = 2 * SIZE + 3
    assert kept.cost().tolist() == [(HEADS * 4 * entry + 10) * 2, (HEADS * 6 * entry + 10) * 2]
