"""Prompts in chunks: what a policy keeps and what it answers do not depend on their size."""

from functools import cache
from pathlib import Path

import pytest
import torch

from evalkit import policies
from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.retention.player import Player
from evalkit.retention.protocol import load
from evalkit.session import Engine
from evalkit.settings import part
from evalkit.trial import Trial
from tests import tiny
from tests.saved import save

NAMES = [*policies.shipped(), *(f"{name}:{preset}" for name in policies.shipped() for preset in policies.find(name).presets)]
SIMULATED = ["h2o:repo-llama", "h2o:repo-opt"]  # one pass over prompt and answer: no part of it is a prompt's
LENGTH = 110  # three chunks of 33 and more: no size divides it, and its last tokens are fewer than an observation window
WHOLE = 4096

pytestmark = pytest.mark.usefixtures("own_cache")


@cache
def model(family: str):
    return tiny.model(family)


def engine(family: str, chunk: int) -> Engine:
    return Engine(model(family), prefill_chunk=chunk, calibration=lambda: tiny.tokens(100, 999))


def tried(name: str):
    """The policy at the first budget it accepts; one that takes none, as it is."""
    try:
        return Trial(lambda budget: policies.build(name, budget)).small
    except UsageError:
        return policies.build(name)


def fed(policy, family: str, chunk: int):
    with tiny.exact():
        session = engine(family, chunk).open(policy)
        session.feed(tiny.tokens(LENGTH))
        return session, [score.logprob for score in session.score([tiny.tokens(1, 1), tiny.tokens(6, 2)])]


@cache
def whole(name: str, family: str):
    return fed(tried(name), family, WHOLE)


@pytest.mark.parametrize("chunk", [16, 33, 64])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SIMULATED])
def test_what_is_kept_and_answered_does_not_depend_on_the_chunk(name: str, family: str, chunk: int) -> None:
    session, answers = fed(tried(name), family, chunk)
    wanted, expected = whole(name, family)
    for held, other in zip(session.caches, wanted.caches, strict=True):
        assert torch.equal(held.positions, other.positions)
        torch.testing.assert_close(dict(held.marks), dict(other.marks), atol=1e-12, rtol=0)
    assert answers == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", policies.shipped())
def test_documents_are_scored_alike_in_chunks(name: str) -> None:
    documents = [Document(tiny.tokens(length, length), (tiny.tokens(2, 1), tiny.tokens(5, 2))) for length in (20, 90, 1)]
    with tiny.exact():
        some, one = ([cell.scores for cell in engine("llama", size).score(documents, [tried(name)])] for size in (16, WHOLE))
    assert [s.logprob for row in some[0] for s in row] == pytest.approx([s.logprob for row in one[0] for s in row], abs=1e-12)


@pytest.mark.parametrize(("chunk", "count", "name", "expected"), [
    (16, 40, "h2o", [(0, 16), (16, 32), (32, 40)]),
    (16, 33, "h2o", [(0, 16), (16, 32), (32, 33)]),
    (16, 32, "h2o", [(0, 16), (16, 32)]),
    (16, 70, "snapkv", [(0, 16), (16, 32), (32, 70)]),  # the last 32 are looked at together
    (1, 34, "snapkv", [(0, 1), (1, 2), (2, 34)]),
    (16, 20, "snapkv", [(0, 20)]),
    (1, 1, "full", [(0, 1)]),
])  # fmt: skip
def test_the_last_chunk_holds_the_observation_window(chunk, count, name, expected) -> None:
    runner = engine("llama", chunk)
    assert runner.blocks(count, [runner.open(policies.build(name)).branch(count)]) == expected


@pytest.mark.parametrize("chunk", [16, 64])
def test_no_row_is_longer_than_a_chunk_and_a_window(chunk: int) -> None:
    runner, rows = engine("llama", chunk), []
    run = runner.run
    runner.run = lambda packing, *given: (rows.append(len(packing.tokens)), run(packing, *given))[1]
    runner.open(policies.build("snapkv", "10%")).feed(tiny.tokens(120))
    assert sum(rows) == 119
    assert max(rows) < chunk + 32


@pytest.mark.parametrize("family", ["llama dynamic", "phi3 longrope"])
def test_where_the_rotation_follows_the_length_a_prompt_is_taken_in_whole(family: str) -> None:
    runner = engine(family, 16)
    assert runner.blocks(90, [runner.open(policies.build("h2o")).branch(90)]) == [(0, 90)]


@pytest.mark.parametrize("name", SIMULATED)
def test_what_must_see_prompt_and_answer_at_once_refuses_chunks(name: str) -> None:
    document, policy = Document(tiny.tokens(21), ((5, 6),)), policies.build(name, "30%")
    with pytest.raises(
        UsageError, match=r"prefill_chunk=16 is below a prompt of 20 tokens, which H2O .* give prefill_chunk=20 or more"
    ):
        engine("llama", 16).score([document], [policy])
    engine("llama", 20).score([document], [policy])


def test_it_is_a_setting_of_models_and_protocols(tmp_path: Path) -> None:
    settings, _, passed = part("h2o", {"prefill_chunk": "64", "dtype": "bfloat16"}, ["dtype"])
    assert (settings.prefill_chunk, passed) == (64, {"dtype": "bfloat16"})
    with pytest.raises(UsageError, match="prefill_chunk=0 is not allowed"):
        part("h2o", {"prefill_chunk": 0}, [])
    protocol = load(given={"model": str(save(tmp_path / "model"))}).model_copy(update={"prefill_chunk": 64})
    assert Player(protocol).worker.lm.engine.prefill_chunk == 64
