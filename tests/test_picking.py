"""Attention to entries that are picked is attention to all under a mask."""

import pytest
import torch

from evalkit import picking, policies
from evalkit.masks import listed
from evalkit.session import Engine
from tests import tiny
from tests.test_offload import answers, engine

pytestmark = pytest.mark.usefixtures("own_cache")


def test_places_of_a_mask_are_listed_in_order():
    mask = torch.tensor([[[0, 1, 1, 0], [1, 0, 0, 1]], [[0, 0, 1, 1], [1, 1, 0, 0]]], dtype=torch.bool)
    order, used = listed(mask)
    assert (order.tolist(), used) == ([[[1, 2], [0, 3]], [[2, 3], [0, 1]]], None)
    mask[0, 0] = torch.tensor([True, True, False, True])
    mask[1, 1] = False
    order, used = listed(mask)
    assert [row[keep].tolist() for row, keep in zip(order.flatten(0, 1), used.flatten(0, 1), strict=True)] == [
        [0, 1, 3],
        [0, 3],
        [2, 3],
        [],
    ]
    order, used = listed(torch.zeros(2, 3, 4, dtype=torch.bool))
    assert order.shape == (2, 3, 0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("name", ["infinigen", "quest", "quest:repo"])
def test_attention_to_what_is_picked_is_attention_under_a_mask(name, family, monkeypatch):
    """On the device it is picked where that is less work; here, always or never."""
    policy = policies.build(name, "30%", **({"page": 4} if name.startswith("quest") else {}))
    found = []
    for least, most in ((1, 1), (1 << 40, 1)):
        monkeypatch.setattr(picking, "LONG", least)
        monkeypatch.setattr(picking, "FEW", most)
        found += [answers(policy, protocol, family, offload=False) for protocol in ("prompt", "stream")]
    for one, other in zip(found[:2], found[2:], strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-12)
        torch.testing.assert_close(one[1], other[1])


@pytest.mark.parametrize("name", ["infinigen", "quest"])
def test_a_long_sequence_is_picked_from(name, monkeypatch):
    tried = []
    monkeypatch.setattr(picking, "listed", lambda mask: (tried.append(mask.shape), listed(mask))[1])
    prompt = tuple(torch.randint(3, 128, (picking.LONG + 40,), generator=torch.Generator().manual_seed(0)).tolist())
    long = Engine(tiny.model(max_position_embeddings=1024), calibration=lambda: tiny.tokens(100, 999), offload=False)
    session = long.open(policies.build(name, "20%"))
    session.feed(prompt)
    session.generate(2, lambda said: False)
    assert len(tried) == 2


def test_policies_see_what_was_attended_to_in_its_place(monkeypatch):
    """Weights over what was picked are handed on as weights over all slots."""
    seen = []

    class Watching(type(policies.build("quest"))):
        def evict(self, cache, query):
            seen.append(cache.weights(query))
            return cache

    for least in (1, 1 << 40):
        monkeypatch.setattr(picking, "LONG", least)
        session = engine().open(Watching(budget=policies.Budget.of("30%"), page=4))
        session.feed(tiny.tokens(60))
        session.generate(2, lambda said: False)
    assert len(seen) == 2 * 3 * 3  # of each way three layers at the prompt's end, and at each token said
    for one, other in zip(seen[:9], seen[9:], strict=True):
        torch.testing.assert_close(one, other)
