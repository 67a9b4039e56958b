"""Entries in host memory: the same answers, only what is read is brought over, and the bytes counted are those copied."""

from functools import cache
from itertools import product

import pytest
import torch

from evalkit import picking, policies
from evalkit.counters import Tally
from evalkit.decoding import Wave
from evalkit.documents import Document
from evalkit.entries import Plain, gather_slots
from evalkit.errors import UsageError
from evalkit.harness.worker import Worker
from evalkit.manifest import policies as measured
from evalkit.masks import listed
from evalkit.offload import Host, Hosted
from evalkit.row import Row
from evalkit.session import Engine
from evalkit.settings import part
from evalkit.shares import FETCHED, FETCHED_BYTES, READ
from evalkit.trial import Trial
from tests import tiny
from tests.saved import save
from tests.stub import planned

PRESETS = [f"{name}:{preset}" for name in policies.shipped() for preset in policies.find(name).presets]
STORED = [name for name in [*policies.shipped(), *PRESETS] if not name.startswith("kivi")]  # KIVI's form stays on the device
ITEM, ELEMENT = 8, 2  # bytes of a number in these models, and as the ledger counts it
SIZE, HEADS, LAYERS = 16, 2, 3  # numbers of an entry's key and value together

pytestmark = pytest.mark.usefixtures("own_cache")


@cache
def model(family):
    return tiny.model(family)


def engine(family="llama", **settings):
    return Engine(model(family), calibration=lambda: tiny.tokens(100, 999), **settings)


def small(name):
    return Trial(lambda budget: policies.build(name, budget)).small


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DOCUMENTS = [
    Document(tiny.tokens(70, 1), (tiny.tokens(1, 2), tiny.tokens(5, 3))),
    Document(tiny.tokens(24, 4), (tiny.tokens(4, 5),)),
    Document(tiny.tokens(24, 6), (tiny.tokens(1, 7), tiny.tokens(2, 8))),
    Document(tiny.tokens(1, 9), (tiny.tokens(3, 10),)),
]


def answers(policy, protocol, family, **settings):
    with tiny.exact():
        (cell,) = engine(family, **settings).score(DOCUMENTS, [policy], protocol)
    return [score.logprob for row in cell.scores for score in row], cell.tally


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("name", STORED)
def test_where_entries_live_changes_no_answer(name, family):
    policy = small(name)
    for protocol in Trial(lambda budget: policies.build(name, budget)).protocols:
        (away, counted), (here, expected) = (answers(policy, protocol, family, offload=offload) for offload in (True, False))
        assert away == pytest.approx(here, abs=1e-12)
        assert torch.equal(counted[READ], expected[READ])
        assert bool((counted[FETCHED] > 0).any())


@pytest.mark.parametrize("name", ["infinigen", "quest", "quest:repo", "h2o:paper"])
def test_a_conversation_goes_on_from_what_was_stored(name):
    said = []
    for offload in (False, True):
        with tiny.exact():
            session = engine(offload=offload, prefill_chunk=16).open(small(name))
            session.feed(tiny.tokens(50, 1))
            one = session.generate(5, lambda said: False)
            session.feed(tiny.tokens(30, 2))
            session.feed(tiny.tokens(9, 3), decoded=True)
            scores = [score.logprob for score in session.fork().score([tiny.tokens(3, 4), tiny.tokens(1, 5)])]
            said.append((one, session.generate(4, lambda said: False), pytest.approx(scores, abs=1e-12)))
            assert all(isinstance(held.entries, Hosted) == offload for held in session.caches)
    assert said[0][:2] == said[1][:2]
    assert said[0][2].expected == said[1][2]


# What is copied


def generated(budget, **settings):
    """A session that said 6 tokens, and its tally."""
    tally = Tally(1, torch.device("cpu"))
    session = engine(**settings).open(policies.build("infinigen", budget), tally=tally)
    session.feed(tiny.tokens(60))
    fed = session.engine.host.fetched
    session.generate(6, lambda said: False)
    return session, session.engine.host.fetched - fed, tally.totals()


@pytest.mark.parametrize("budget", ["10%", "50%", "100%"])
def test_the_bytes_counted_are_those_that_were_copied(budget):
    _, copied, tally = generated(budget)
    assert copied == int(tally[FETCHED_BYTES]) * ITEM // ELEMENT > 0


def test_what_a_smaller_budget_reads_is_less_to_copy():
    fetched = [generated(budget)[1] for budget in ("10%", "50%", "100%")]
    assert fetched == sorted(set(fetched))


def test_every_entry_is_stored_once():
    session, _, _ = generated("10%")
    assert session.engine.host.stored == session.seen * LAYERS * HEADS * SIZE * ITEM
    assert all((held.entries.newer, held.entries.slots) == (None, session.seen) for held in session.caches)


def test_cells_that_hold_the_same_store_it_once():
    alone, together = engine(), engine()
    several = [policies.build("infinigen", budget) for budget in ("10%", "30%", "50%")]
    alone.score(DOCUMENTS[:1], several[:1])
    together.score(DOCUMENTS[:1], several)
    assert alone.host.stored == together.host.stored > 0


def test_without_a_host_what_would_be_copied_is_counted():
    session, copied, tally = generated("10%", offload=False)
    assert (copied, session.engine.host.stored) == (0, 0)
    assert torch.equal(tally, generated("10%")[2])


def test_policies_that_do_not_ask_for_it_stay_on_the_device():
    whole = engine()
    whole.score(DOCUMENTS, [small("h2o"), small("quest")])
    assert (whole.host.stored, whole.host.fetched) == (0, 0)


# Ahead of the layer


def test_what_a_token_reads_is_on_its_way_before_its_layer_begins(monkeypatch):
    """From the third layer on, where InfiniGen chooses; the first two fetch everything when they attend."""
    seen, foresee, attend = [], Wave.foresee, Row.attend

    def foreseeing(wave, layer, *given):
        before = wave.cell.host.fetched
        foresee(wave, layer, *given)
        seen.append(("foreseen", layer, wave.cell.host.fetched - before))

    def attending(row, layer, *given):
        before = row.host.fetched
        output = attend(row, layer, *given)
        seen.append(("attended", layer.index, row.host.fetched - before))
        return output

    session, _, _ = generated("10%")
    monkeypatch.setattr(Wave, "foresee", foreseeing)
    monkeypatch.setattr(Row, "attend", attending)
    session.generate(1, lambda said: False)
    whole, most = (SIZE * HEADS * ITEM * count for count in (session.seen - 1, 5))
    assert seen[:3] == [("attended", 0, whole), ("foreseen", 1, 0), ("attended", 1, whole)]
    assert [(what, layer) for what, layer, _ in seen[3:]] == [("foreseen", 2), ("attended", 2)]
    assert 0 < seen[3][2] <= most
    assert seen[4][2] == 0


# The form


def held(length, seed=0, rows=2):
    return random(rows, HEADS, length, 4, seed=seed), random(rows, HEADS, length, 4, seed=seed + 1)


def same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)


ORDER = torch.tensor([[[0, 3, 4], [1, 2, 6]], [[2, 5, 6], [0, 1, 3]]])
slots = lambda entries: entries.dense()[0].shape[2]  # noqa: E731
CHANGES = {
    "append": lambda entries: entries.append(*held(3, 5)),
    "take": lambda entries: entries.take(ORDER),
    "rows": lambda entries: entries.rows(torch.tensor([1, 0])),
    "slice": lambda entries: entries.rows(slice(0, 2)),
    "stack": lambda entries: entries.stack([entries, entries.take(ORDER)], [0, slots(entries) - 3]).rows(torch.tensor([2, 1])),
}


@pytest.mark.parametrize("changes", [pair for pair in product(CHANGES, repeat=2) if pair[0] != "take"] + [("take", "append")])
def test_it_holds_what_plain_entries_hold(changes):
    plain = Plain.of(*held(7))
    before, hosted = [tensor.clone() for tensor in plain.dense()], Hosted.of(plain, Host())
    wanted, found = plain, hosted
    for change in changes:
        wanted, found = CHANGES[change](wanted), CHANGES[change](found)
        same(found.dense(), wanted.dense())
        same(found.newest(2), wanted.newest(2))
        same(found.settled().chosen(ORDER[..., 1:] % 3), wanted.chosen(ORDER[..., 1:] % 3))
    assert (found.slots, found.size, found.dtype) == (slots(wanted), wanted.size, wanted.dtype)
    same(hosted.dense(), before)
    same(plain.dense(), before)


def test_a_fork_leaves_what_was_stored_alone():
    first = Hosted.of(Plain.of(*held(7)), Host())
    one, other = (first.append(*held(2, seed)).settled() for seed in (3, 4))
    same([tensor[:, :, 7:] for tensor in one.dense()], held(2, 3))
    same([tensor[:, :, 7:] for tensor in other.dense()], held(2, 4))


def test_the_newest_are_on_the_device_until_they_are_stored():
    host = Host()
    grown = Hosted.of(Plain.of(*held(7)), host).append(*held(2, 3))
    same(grown.newest(2), held(2, 3))
    assert host.fetched == 0
    stored = host.stored
    grown.settled()
    assert host.stored - stored == sum(tensor.nbytes for tensor in held(2))


@pytest.mark.parametrize("layout", [
    lambda keys: keys,
    lambda keys: keys.transpose(1, 2).contiguous().transpose(1, 2),  # as a layer's projections leave them
    lambda keys: torch.cat([keys, keys, keys], dim=3).chunk(3, dim=3)[1],  # as fused projections do
    lambda keys: torch.cat([keys, keys], dim=2)[:, :, 3:10],
    lambda keys: keys[:1].expand(2, -1, -1, -1),
    lambda keys: torch.nn.functional.pad(keys, (0, 1))[..., :4],  # not in one piece: number by number
])  # fmt: skip
def test_slots_are_gathered_from_every_layout(layout):
    keys = layout(held(7)[0])
    expected = torch.stack(
        [torch.stack([head[order] for head, order in zip(*pair, strict=True)]) for pair in zip(keys, ORDER, strict=True)]
    )
    assert torch.equal(gather_slots(keys, ORDER), expected)


# Attention to what is picked


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
            seen.append(cache.weights(query).sum(-1))
            assert cache.weights(query).shape[-1] == cache.slots
            return cache

    monkeypatch.setattr(picking, "LONG", 1)
    session = engine().open(Watching(budget=policies.Budget.of("30%"), page=4))
    session.feed(tiny.tokens(60))
    session.generate(2, lambda said: False)
    assert all(torch.allclose(total, torch.ones_like(total)) for total in seen)


# As it is asked for


def test_what_is_stored_in_a_form_of_its_own_refuses_in_a_line():
    refusal = "offload=true: KIVI stores entries in a form of its own, which stays on the device: give offload=auto"
    with pytest.raises(UsageError, match=refusal):
        part("kivi", {"budget": "50%", "offload": True}, [])
    with pytest.raises(UsageError, match=f"policy kivi of the plan: {refusal}"):
        measured(planned(policies=["kivi"], budgets=["50%"], offload=True))
    with pytest.raises(UsageError, match=refusal):
        engine(offload=True).open(policies.build("kivi", "50%"))


def test_it_is_a_setting_of_models():
    assert part("infinigen", {}, [])[0].offload == "auto"
    assert part("infinigen", {"offload": False}, [])[0].offload is False
    with pytest.raises(UsageError, match="offload=always is not allowed"):
        part("infinigen", {"offload": "always"}, [])


def test_a_worker_stores_entries_as_its_settings_say(tmp_path):
    folder = save(tmp_path)
    for offload, away in (("auto", True), (False, False)):
        lm = Worker(str(folder), {"device": "cpu"}, {"offload": offload}).lm
        lm.engine.score(DOCUMENTS[:1], [policies.build("infinigen", "20%")])
        assert (lm.engine.host.stored > 0) == away
        moved = {"to_host_bytes": lm.engine.host.stored, "to_device_bytes": lm.engine.host.fetched}
        assert lm.ledger().get("moved") == (moved if away else None)
