"""Documents under many cells: what is computed once, what is counted, what a budget grants, and how much memory it takes."""

from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evalkit import attention, masks
from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.model import tiny as llama
from evalkit.policies import build, shipped
from evalkit.policy import Budget
from evalkit.session import Engine
from evalkit.shares import BYTES, DENSE_BYTES, FETCHED, FETCHED_BYTES, HELD, QUERIES, REACH, READ, SPAN
from evalkit.trial import Trial
from tests import tiny

MODEL = llama(1)
LAYERS, HEADS = 3, 2
tokens = tiny.tokens


def engine(**settings):
    return Engine(MODEL, **settings)


def logprobs(scores):
    return [score.logprob for score in scores]


# Cells and rows


CELLS = [("h2o", "30%"), ("h2o", "60%"), ("h2o:paper", "30%"), ("full", "100%"), ("snapkv", "50%"), ("streaming_llm", 8)]
DOCUMENTS = [
    Document(tokens(31, 1), (tokens(1, 2), tokens(4, 3))),
    Document(tokens(31, 1)[:20] + tokens(7, 4), (tokens(2, 5),)),
    Document(tokens(1, 6), (tokens(3, 7),)),
    Document(tokens(31, 8), (tokens(1, 9),)),
]


def test_many_cells_in_one_pass_score_as_each_alone():
    policies = [build(*cell) for cell in CELLS]
    for policy, together in zip(policies, engine().score(DOCUMENTS, policies), strict=True):
        alone = engine().score(DOCUMENTS, [policy])[0]
        for one, other in zip(together.scores, alone.scores, strict=True):
            assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-9)
        torch.testing.assert_close(together.tally, alone.tally)


def computed(documents, policies, protocol="prompt"):
    counted = engine()
    results = counted.score(documents, policies, protocol)
    return counted.counters.tokens["computed"], results


def test_a_prompt_is_taken_in_once_for_all_cells():
    document = Document(tokens(31), (tokens(4, 1),))
    assert computed([document], [build(*cell) for cell in CELLS])[0] == 30 + len(CELLS) * 4


def test_equal_cells_are_one():
    """At 30 tokens a share of 30% and a number of 9 tokens grant the same; both get the scores and the tally."""
    document = Document(tokens(31), (tokens(4, 1),))
    count, results = computed([document], [build("h2o", "30%"), build("h2o", 9), build("h2o", "32%")])
    assert count == 30 + 4
    assert results[0].scores == results[1].scores == results[2].scores
    assert torch.equal(results[0].tally, results[1].tally)
    assert computed([document], [build("h2o", "30%"), build("h2o", 10)])[0] == 30 + 2 * 4


@pytest.mark.parametrize("protocol", ["prompt", "stream"])
def test_all_that_read_everything_are_one_and_only_what_lies_in_host_memory_is_fetched(protocol):
    ready = engine(calibration=lambda: tokens(60))
    whole = [build("h2o", "100%"), build("infinigen", "100%"), build("full")]
    documents = [document for document in DOCUMENTS if len(document.prompt) > 1]
    h2o, infinigen, full = ready.score(documents, whole, protocol)
    assert h2o.scores == infinigen.scores == full.scores
    alone = ready.score(documents, whole[1:2], protocol)[0]
    for one, other in zip(infinigen.scores, alone.scores, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-9)
    torch.testing.assert_close(infinigen.tally, alone.tally)
    assert infinigen.tally[FETCHED].all() and infinigen.tally[FETCHED_BYTES].all()
    assert not full.tally[[FETCHED, FETCHED_BYTES]].any() and not h2o.tally[[FETCHED, FETCHED_BYTES]].any()


def test_only_tokens_that_a_guess_is_made_for_are_rehearsed(monkeypatch):
    """Projections run again for the answer's tokens under the policy that guesses, and for no prompt and no other cell."""
    rehearsed, at = [], attention._at
    monkeypatch.setattr(attention, "_at", lambda given, places, count: rehearsed.append(len(places)) or at(given, places, count))
    document, policies = Document(tokens(31), (tokens(4, 1),)), [build("infinigen", "30%"), build("h2o", "30%")]
    both = engine(calibration=lambda: tokens(60)).score([document], policies)
    assert set(rehearsed) == {4}
    alone = engine(calibration=lambda: tokens(60)).score([document], policies[:1])
    assert logprobs(both[0].scores[0]) == pytest.approx(logprobs(alone[0].scores[0]), abs=1e-9)


def test_beginnings_of_prompts_and_answers_are_computed_once():
    prompts = [tokens(31, 1), tokens(31, 1)[:20] + tokens(11, 2)]
    asked = [Document(prompt, ((5, 6, 7), (5, 6, 8), (9,))) for prompt in prompts]
    assert computed(asked, [build("full")])[0] == 30 + 10 + 2 * 3  # the waiting token, 5 and 6


@pytest.mark.parametrize("settings", [{"row_tokens": 1}, {"row_documents": 1}, {"row_documents": 3}])
def test_rows_change_no_score_and_every_document_is_reported(settings):
    reported, policy = [], build("h2o", "30%")
    apart = engine(**settings).score(DOCUMENTS, [policy], progress=reported.append)[0].scores
    for one, other in zip(apart, engine().score(DOCUMENTS, [policy])[0].scores, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-9)
    assert sum(reported) == len(DOCUMENTS)
    assert settings != {"row_documents": 1} or reported == [1] * len(DOCUMENTS)


# What is counted


def expected(document, granted, own):
    """Entries held and read over layers and heads, where each query reads `granted` entries and `own(depth)` of its answer."""
    queries = [depth for answer in document.answers for depth in range(len(answer))]
    return granted * LAYERS * HEADS, sum(granted + own(depth) for depth in queries) * LAYERS * HEADS


@pytest.mark.parametrize(
    ("name", "protocol", "own"),
    [
        ("h2o", "prompt", lambda depth: depth + 1),
        ("h2o:paper", "prompt", lambda depth: 1),
        ("h2o", "stream", lambda depth: 1),
        ("snapkv", "prompt", lambda depth: depth + 1),
    ],
)
def test_entries_held_and_read_are_counted(name, protocol, own):
    policy = build(name, "30%")
    tally = engine().score(DOCUMENTS, [policy], protocol)[0].tally
    for number, document in enumerate(DOCUMENTS):
        if document.basis:
            held, read = expected(document, policy.budget.allowance(document.basis), own)
            assert (tally[HELD, number], tally[READ, number]) == (held, read)
            assert tally[SPAN, number] == document.basis * LAYERS * HEADS
        assert tally[QUERIES, number] == sum(map(len, document.answers))


@pytest.mark.parametrize("protocol", ["prompt", "stream"])
def test_the_full_cache_holds_and_reads_everything(protocol):
    tally = engine().score(DOCUMENTS, [build("full")], protocol)[0].tally
    assert torch.equal(tally[HELD], tally[SPAN])
    assert torch.equal(tally[READ], tally[REACH])
    assert torch.equal(tally[BYTES], tally[DENSE_BYTES])
    reach = [expected(document, document.basis, lambda depth: depth + 1)[1] for document in DOCUMENTS]
    assert tally[REACH].tolist() == reach


# Budgets


@pytest.mark.parametrize(
    ("given", "seen", "allowed"),
    [("10%", 69, 6), (0.1, 9, 1), ("0.3", 10, 3), ("29%", 100, 29), (256, 10, 256), ("100%", 7, 7), ("1e-2", 400, 4)],
)
def test_an_allowance_is_the_share_rounded_down_and_one_at_least(given, seen, allowed):
    assert Budget.of(given).allowance(seen) == allowed


@pytest.mark.parametrize("given", ["0", "-0.1", "1.5", "nan", "none", "110%", "0%", ""])
def test_other_budgets_are_refused(given):
    with pytest.raises(UsageError, match="is not allowed: give a share"):
        Budget.of(given)


def test_a_budget_of_1_is_refused_as_unclear():
    with pytest.raises(UsageError, match="budget=1 could mean all or one token"):
        Budget.of(1)


# Memory


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
        return result


LENGTH = 700
BLOCK = 1 << 14


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv", "tova", "quest", "streaming_llm"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_long_prompt_needs_no_tensor_of_its_length_squared(name, family):
    """Every tensor is linear in the prompt, but for blocks of a fixed size."""
    prompt = tuple(torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist())
    session = Engine(tiny.model(family, max_position_embeddings=4096)).open(build(name, "10%"))
    with patch.object(masks, "BLOCK_ELEMENTS", BLOCK), Largest() as largest:
        session.feed(prompt)
        session.feed(tokens(40))
    assert BLOCK / 2 < largest.elements <= LENGTH * 128 < LENGTH**2 / 4


@pytest.mark.parametrize("name", shipped())
def test_a_beginning_that_all_prompts_share_is_taken_in_once_and_changes_nothing(name):
    begin = (*tokens(100, 1), *tokens(60, 2))
    asked = [Document((*begin, *tokens(6 + i, 10 + i)), (tokens(3, 20 + i), tokens(1, 30 + i))) for i in range(5)]
    cells = [build("full"), Trial(lambda budget: build(name, budget)).small]
    once, each = (engine(row_tokens=64, prefill_chunk=size, calibration=lambda: tokens(100, 9)) for size in (64, 4096))
    together, apart = once.score(asked, cells), each.score(asked, cells, prefix=0)
    for one, other in zip(together, apart, strict=True):
        for (got, *_), (wanted, *_) in zip(one.scores, other.scores, strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-9)
        torch.testing.assert_close(one.tally, other.tally)
    assert once.counters.tokens["computed"] < each.counters.tokens["computed"] / 2
