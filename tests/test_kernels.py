"""Attention kernels: each computes what plain matrix products do, whatever it leaves out."""

from itertools import product

import pytest
import torch

from evalkit import attention, kernels, masks, picking
from evalkit.cache import LayerCache
from evalkit.counters import Counters
from evalkit.kernels import drawing, explicit, under, whole
from evalkit.layer import Layer
from evalkit.memory import Block, Branch
from evalkit.packing import Packing
from evalkit.picking import narrowed
from evalkit.policies import build
from evalkit.row import Row
from evalkit.session import Engine
from tests import tiny

LAYER = Layer(scaling=0.25)
HEADS, GROUP, SIZE = 2, 3, 16


def facts(count, slots, batch=1, dtype=torch.float64):
    """Queries as a row lays them, [B, H, G, T, D], keys and values [B, H, S, D]."""
    torch.manual_seed(count)
    query = torch.randn(batch, count, HEADS, GROUP, SIZE).to(dtype).permute(0, 2, 3, 1, 4)
    return query, *torch.randn(2, batch, HEADS, slots, SIZE).to(dtype)


def continued(count, slots, layer=LAYER):
    """A cache whose last `count` slots were taken in last, and their queries."""
    query, keys, values = facts(count, slots)
    begun = LayerCache.begun(layer, keys[:, :, :-count], values[:, :, :-count], complete=True)
    return begun.append(keys[:, :, -count:], values[:, :, -count:]), query


def plainly(cache, query):
    return explicit(LAYER, query, *cache.entries.dense(), cache.visible(query.shape[3]))


@pytest.mark.parametrize("count", [kernels.MANY - 1, kernels.MANY])
@pytest.mark.parametrize(("batch", "shape"), [(1, (1, 1)), *product([1, 3], product([1, HEADS], [1, GROUP]))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_masks_of_any_shape_hide_what_they_hide(dtype, batch, shape, count):
    query, keys, values = facts(count, 50, batch, dtype)
    mask = torch.rand(batch, *shape, count, 50) < 0.4
    mask[..., 3] = True  # every query sees something
    expected = explicit(LAYER, query, keys, values, mask)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(under(LAYER, query, keys, values, mask, "sdpa"), expected, atol=close, rtol=0)


@pytest.mark.parametrize("count", [1, 7, 90])
@pytest.mark.parametrize("window", [None, 200, 150])
def test_a_long_past_and_what_is_new_are_attended_to_apart(count, window, monkeypatch):
    cache, query = continued(count, 200, Layer(scaling=0.25, window=window))
    expected, attended = plainly(cache, query), []
    apart = kernels.apart
    monkeypatch.setattr(kernels, "LONG", 100)
    monkeypatch.setattr(kernels, "apart", lambda *given: attended.append(given) or apart(*given))
    torch.testing.assert_close(whole(cache, query, "sdpa"), expected, atol=1e-12, rtol=0)
    assert len(attended) == (window != 150)  # which hides some of the past
    torch.testing.assert_close(whole(cache, query, "eager"), expected, atol=1e-12, rtol=0)
    assert len(attended) == (window != 150)


def test_only_what_rounds_alike_gives_outputs_by_the_weights_that_are_looked_at():
    single, half = torch.zeros(2, dtype=torch.float32), torch.zeros(2, dtype=torch.bfloat16)
    assert [kernels.fused("sdpa", single), kernels.fused("sdpa", half), kernels.fused("eager", half)] == [False, True, False]


@pytest.mark.parametrize("elements", [masks.BLOCK_ELEMENTS, 3000])  # one block, and many
def test_what_slots_receive_comes_with_the_outputs(elements, monkeypatch):
    cache, query = continued(40, 70)
    expected = plainly(cache, query), LAYER.attention(query, cache.entries.dense()[0], cache.visible(40)).sum(3)
    monkeypatch.setattr(masks, "BLOCK_ELEMENTS", elements)
    for found, wanted in zip(drawing(cache, query), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(cache.received(query), expected[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("few", [True, False])
def test_slots_that_some_query_sees_are_brought_together_where_they_are_few(few, monkeypatch):
    monkeypatch.setattr(picking, "LONG", 100)
    query, keys, values = facts(5, 200)
    seen = torch.zeros(1, HEADS, 1, 5, 200, dtype=torch.bool)
    seen[:, 0, :, :, 7:20], seen[:, 1, :, :, 100:190] = True, True  # heads see unequal numbers
    seen[:, 1, :, 2, 150:] = False
    if not few:
        seen[:, 1, :, 1] = True
    narrow = narrowed(keys, values, seen)
    assert narrow[0].shape[2] == (90 if few else 200)
    torch.testing.assert_close(under(LAYER, query, *narrow, "sdpa"), explicit(LAYER, query, keys, values, seen), atol=1e-12, rtol=0)


# What nobody reads is not computed


class Attending(Row):
    """A row whose layers' outputs can be looked at; in its last layer all of them are made where `whole` is set."""

    whole = False

    def attend(self, layer, *given):
        self.asked = None if self.whole else self.asked
        output = super().attend(layer, *given)
        self.__dict__.setdefault("outputs", []).append(output.clone())
        return output


@pytest.mark.parametrize("name", ["full", "h2o", "tova", "snapkv"])
def test_the_last_layer_attends_only_where_a_prediction_is_read(name):
    engine, rows = Engine(tiny.model()), []
    for entire in (True, False):
        session, packing = engine.open(build(name, None if name == "full" else "30%")), Packing()
        session.pack(packing, tiny.tokens(30))
        row = Attending(packing.jobs, Counters(), asked=frozenset())
        row.whole = entire
        attention.run(engine.model, row, packing.tokens, packing.positions, [])
        rows.append(
            (row.outputs, [cache.positions for cache in session.caches], [cache.entries.dense() for cache in session.caches])
        )
    (every, *held), (some, *same) = rows
    assert all(torch.equal(one, other) for one, other in zip(every[:-1], some[:-1], strict=True))
    assert every[-1].any() and not some[-1].any()
    torch.testing.assert_close(held, same, atol=0, rtol=0)


def test_a_row_of_which_nothing_is_read_predicts_nothing():
    engine, packing = Engine(tiny.model()), Packing()
    packing.jobs.append(Block(torch.tensor([packing.place(tiny.tokens(9), 0)]), 9, [Branch(engine.cell(build("full")), None, [0])]))
    assert engine.run(packing).shape == (0, tiny.VOCABULARY)


@pytest.mark.parametrize("mask", [None, (1, 1), (HEADS, 1), (HEADS, GROUP)])
@pytest.mark.parametrize(("kernel", "looked_at", "layer"), [
    ("sdpa", False, LAYER), ("sdpa", True, LAYER), ("eager", False, LAYER), ("sdpa", False, Layer(scaling=0.25, softcap=5.0)),
])  # fmt: skip
def test_a_decoded_token_attends_alike_whether_its_weights_are_looked_at_or_not(kernel, looked_at, layer, mask):
    query, keys, values = facts(1, 40, batch=2)
    seen = None if mask is None else torch.rand(2, *mask, 1, 40) < 0.4
    if seen is not None:
        seen[..., 3] = True
    expected = layer.attention(query, keys, seen)
    output, weighed = kernels.stepped(layer, query, keys, values, seen, kernel, looked_at=looked_at)
    torch.testing.assert_close(weighed(), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(output, kernels.mixed(expected, values), atol=1e-12, rtol=0)


def test_a_policy_that_only_observes_can_ask_for_the_weights_of_what_was_read(monkeypatch):
    """Whose outputs come from a fused kernel: the weights are made when they are asked for."""
    made, seen = [], []
    attention = Layer.attention
    monkeypatch.setattr(Layer, "attention", lambda *given: made.append(given) or attention(*given))
    policy = build("quest(dense_layers=0,page=4)", "30%")
    watching = type(
        "Watching",
        (type(policy),),
        {"observe": lambda self, cache, query: seen.append(cache.weights(query)) or type(policy).observe(self, cache, query)},
    )
    engine = Engine(tiny.model("llama"))
    for one, asks in ((policy, 0), (watching(**vars(policy)), 1)):
        session = engine.open(one)
        session.feed([*range(3, 60)])
        made.clear(), seen.clear()
        session.generate(1, lambda _: True)
        assert len(made) == asks * len(session.caches)
    assert all(torch.allclose(weights.sum(-1), weights.new_ones(())) for weights in seen)
    assert any((weights[..., :-1] == 0).any() for weights in seen)
