"""Entries in host memory: the same answers, only what is read is brought over, and the bytes counted are those copied."""

from functools import cache

import pytest
import torch

from evalkit import policies
from evalkit.counters import Tally
from evalkit.decoding import Wave
from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.harness.worker import Worker
from evalkit.manifest import policies as measured
from evalkit.offload import Hosted
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
