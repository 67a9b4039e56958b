"""What a result says it held, read and stored: never another cell's, never nothing where something was."""

import pytest
import torch

from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.ledger import Record, refuse_idle
from evalkit.model import tiny
from evalkit.policies import build
from evalkit.requests import Request, admitted
from evalkit.session import Engine
from evalkit.shares import BYTES, DENSE_BYTES, HELD, QUANTITIES, REACH, READ, SPAN, acted
from tests.tiny import tokens


def share(tally, part, whole):
    return float(tally[part].sum() / tally[whole].sum())


@pytest.mark.parametrize("order", [("h2o", "full"), ("full", "h2o")])
def test_a_long_prompts_bytes_are_each_cells_own(order):
    engine = Engine(tiny(), prefill_chunk=16)
    cells = engine.score(
        [Document(tokens(70), (tokens(2, 1),))], [build(name, "100%" if name == "full" else "50%") for name in order]
    )
    bytes_held = {name: share(cell.tally, BYTES, DENSE_BYTES) for name, cell in zip(order, cells, strict=True)}
    assert bytes_held["full"] == 1.0
    assert 0.5 < bytes_held["h2o"] < 0.57


@pytest.mark.parametrize(("name", "budget"), [("kivi", "40%"), ("h2o", "40%"), ("streaming_llm", "40%")])
def test_texts_without_a_prompt_are_counted_too(name, budget):
    text = tokens(101)
    document = Document(text[:1], (text[1:],), length=100)
    (cell,) = Engine(tiny()).score([document], [build(name, budget)], "stream")
    assert bool(acted(cell.tally).all())
    what = (BYTES, DENSE_BYTES) if name == "kivi" else (HELD, SPAN)
    assert 0.2 < share(cell.tally, *what) <= 0.45


def test_no_documents_is_no_error():
    (cell,) = Engine(tiny()).score([], [build("h2o", "40%")])
    assert cell.tally.shape == (len(QUANTITIES), 0)
    refuse_idle(cell.policy, [], cell.tally)
    record = Record()
    record.add([], cell.tally)
    assert record.as_dict()["acted"] is None


def test_a_session_that_generates_is_counted():
    from evalkit.counters import Tally

    tally = Tally(1, torch.device("cpu"))
    session = Engine(tiny()).open(build("h2o", "20%"), tally=tally)
    session.feed(tokens(51))
    session.generate(4, lambda said: False)
    totals = tally.totals()
    assert share(totals, HELD, SPAN) == 0.2
    assert share(totals, READ, REACH) == pytest.approx((11 + 12 + 13 + 14) / (51 + 52 + 53 + 54))


def test_an_unknown_protocol_is_refused_everywhere():
    engine = Engine(tiny())
    with pytest.raises(UsageError, match=r"protocol=strem is not known.*'stream'"):
        engine.score([], [build("full")], "strem")
    with pytest.raises(UsageError, match="protocol=strem is not known"):
        engine.open(build("full"), "strem")


def test_a_document_is_skipped_with_all_its_answers():
    asked = [
        Request(0, "t", (1,) * 8, (2,), "doc 0"),
        Request(1, "t", (1,) * 8, (2, 3, 4, 5), "doc 0"),
        Request(2, "t", (1,) * 8, (2,), "doc 1"),
        Request(3, "t", (1,), (2,) * 30, "doc 2"),
    ]
    record = Record()
    assert [request.number for request in admitted(asked, 10, "skip", record)] == [2]
    assert record.skipped == 2


def test_a_simulation_fits_models_of_exactly_its_length():
    """It takes in an answer's last token, for which others need no position."""
    policy = build("h2o:repo-opt", "50%")
    (cell,) = Engine(tiny(max_position_embeddings=12)).score([Document(tokens(9), (tokens(3, 1),))], [policy])
    assert cell.scores[0][0].logprob < 0
