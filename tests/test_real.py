"""On the default model in float32: packed rows and streaming equal one token at a time but for ties, which are counted."""

import json

import pytest
import torch

from evalkit.documents import Document
from evalkit.policies import build
from evalkit.session import Engine
from evalkit.settings import located

CLOSE = 1e-3  # log-likelihoods; kept sets may differ only where two entries' scores all but tie


@pytest.fixture(scope="module")
def engine_and_documents(data):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from evalkit.rooms import room

    folder = located(None, {})["pretrained"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = (room("tasks") / "calibration.txt").read_text(encoding="utf-8")
    engine = Engine(model, calibration=lambda: tokenizer(text)["input_ids"])
    documents = []
    for line in (data / "piqa" / "validation.jsonl").read_text(encoding="utf-8").splitlines()[:3]:
        row = json.loads(line)
        context = f"Question: {row['goal']}\nAnswer:"
        prompt = tokenizer(context)["input_ids"]
        answers = [tokenizer(f"{context} {row[name]}")["input_ids"][len(prompt) :][:6] for name in ("sol1", "sol2")]
        documents.append(Document(tuple(prompt), tuple(map(tuple, answers))))
    return engine, documents


@pytest.mark.parametrize("name", ["h2o", "infinigen"])
def test_stream_equals_one_token_at_a_time_but_for_ties(engine_and_documents, name, record_property):
    engine, documents = engine_and_documents
    policy = build(name, "30%")
    packed = engine.score(documents, [policy], "stream")[0].scores
    ties = 0
    for document, scores in zip(documents, packed, strict=True):
        whole, alone = engine.open(policy, "stream"), engine.open(policy, "stream")
        whole.feed(document.prompt)
        for token in document.taken:
            alone.step([token], document.basis, 0)
            alone.seen += 1
        alone.waiting = document.prompt[-1:]
        same = all(torch.equal(one.positions, other.positions) for one, other in zip(whole.caches, alone.caches, strict=True))
        ties += not same
        again = alone.score(document.answers)
        if same:
            assert [score.logprob for score in scores] == pytest.approx([score.logprob for score in again], abs=CLOSE)
    record_property("documents with a tie", ties)
    print(f"{name}: {ties} of {len(documents)} documents keep another set somewhere")
    assert ties < len(documents), "every document keeps another set: that is no tie"
