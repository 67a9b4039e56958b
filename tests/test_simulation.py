"""The authors' lm-eval harness of H2O, simulated: masks, scores and what it may look at."""

import json
from pathlib import Path

import pytest
import torch

from evalkit.cache import LayerCache
from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.layer import Layer
from evalkit.model import tiny
from evalkit.policies import build
from evalkit.session import Engine
from tests.authors.recording.tensors import drawn

AUTHORS = Path(__file__).parent / "authors"


def cases(name: str) -> list[dict]:
    return json.loads((AUTHORS / f"{name}.json").read_text())["cases"]


@pytest.mark.parametrize("case", cases("h2o_lm_eval_llama"), ids=lambda case: case["name"])
def test_the_global_mask_is_the_authors(case):
    heavy, recent, cache, query = given(case)
    received = build("h2o").best(cache.received(query).sum(2), heavy)
    assert seen(received, recent, cache) == case["expected"]["mask"]


@pytest.mark.parametrize("case", cases("h2o_lm_eval_opt"), ids=lambda case: case["name"])
def test_the_local_mask_is_the_authors(case):
    heavy, recent, cache, query = given(case)
    assert seen(build("h2o").race(cache.weights(query).sum(2), heavy), recent, cache) == case["expected"]["mask"]


def given(case):
    query, keys, values = drawn(case["inputs"], torch.float64)
    tokens, parameters = query.shape[1], case["parameters"]
    cache = LayerCache.empty(Layer(scaling=query.shape[2] ** -0.5), keys[None], 1).append(keys[None], values[None])
    return int(parameters["heavy_ratio"] * tokens), int(parameters["recent_ratio"] * tokens), cache, query[None][:, :, None]


def seen(heavy, recent, cache):
    rows = torch.arange(cache.slots)
    mask = ((heavy | (rows[:, None] - rows <= recent)) & cache.visible(cache.slots)[:, :, 0])[0]
    return [["".join("1" if entry else "0" for entry in row) for row in head.tolist()] for head in mask]


DOCUMENT = Document(tuple(range(1, 31)), ((40, 41, 42), (50,), (40, 60, 61, 62, 63)))


def scores(policy, document=DOCUMENT):
    return [score.logprob for score in Engine(tiny()).score([document], [policy])[0].scores[0]]


@pytest.mark.parametrize("preset", ["h2o:repo-llama", "h2o:repo-opt"])
def test_a_full_budget_is_the_full_cache(preset):
    assert scores(build(preset, "100%")) == pytest.approx(scores(build("full")), abs=1e-10)


@pytest.mark.parametrize("preset", ["h2o:repo-llama", "h2o:repo-opt"])
def test_a_small_budget_changes_every_answer(preset):
    assert all(abs(a - b) > 1e-6 for a, b in zip(scores(build(preset, 0.2)), scores(build("full")), strict=True))


def test_only_the_global_form_looks_ahead():
    """With another last answer token the first tokens' odds may change only where all rows rank the columns."""
    one, other = (Document(DOCUMENT.prompt, ((40, 41, last),)) for last in (42, 77))
    model = tiny()
    change = {}
    for preset in ("h2o:repo-llama", "h2o:repo-opt"):
        first = [prefix_odds(model, build(preset, 0.3), document) for document in (one, other)]
        change[preset] = abs(first[0] - first[1])
    assert change["h2o:repo-opt"] < 1e-12 < change["h2o:repo-llama"]


def prefix_odds(model, policy, document):
    """The odds of the first two answer tokens: those of the whole less those of the last."""
    from evalkit.documents import Asked
    from evalkit.packing import Packing

    engine = Engine(model)
    cell, packing = engine.cell(policy), Packing()
    packing.simulated([Asked(0, document, cell, [0])])
    logits = engine.run(packing)
    return float(logits[:2].log_softmax(-1)[range(2), packing.readout.targets[:2]].sum())


def test_a_simulation_refuses_to_stream_and_to_go_on():
    policy = build("h2o:repo-llama", 0.2)
    with pytest.raises(UsageError, match="protocol=stream"):
        Engine(tiny()).score([DOCUMENT], [policy], "stream")
    with pytest.raises(UsageError, match="cannot go on"):
        Engine(tiny()).open(policy)


def test_what_is_read_is_counted():
    (cell,) = Engine(tiny()).score([DOCUMENT], [build("h2o:repo-opt", 0.2)])
    from evalkit.shares import HELD, REACH, READ, SPAN

    assert cell.tally[HELD] == cell.tally[SPAN]
    assert 0.1 < float(cell.tally[READ] / cell.tally[REACH]) < 0.4
