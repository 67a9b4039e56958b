"""Packed prompts go to flash-attn in one call: its place is taken by a stand-in, since it runs on CUDA only."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from evalkit.documents import Document
from evalkit.model import tiny
from evalkit.policies import build
from evalkit.session import Engine
from tests.tiny import model, tokens

DOCUMENTS = [Document(tokens(count, count), (tokens(3, 90), tokens(1, 91))) for count in (30, 12, 30, 1, 45)]


@pytest.fixture
def calls(monkeypatch):
    """The lengths that each call of the stand-in was given."""
    seen = []

    def varlen(query, keys, values, ends, _ends, longest, _longest, *, softmax_scale, causal, window_size, softcap):
        assert causal
        assert softcap == 0.0
        lengths = ends.diff().tolist()
        assert longest == max(lengths)
        seen.append(lengths)
        parts = []
        for q, k, v in zip(query.split(lengths), keys.split(lengths), values.split(lengths), strict=True):
            rows = torch.arange(len(q))
            near = rows[:, None] - rows
            mask = (near >= 0) & ((near <= window_size[0]) | (window_size[0] < 0))
            heads = (part.transpose(0, 1)[None] for part in (q, k, v))
            parts.append(scaled_dot_product_attention(*heads, mask, scale=softmax_scale, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(parts)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return seen


def scores(built, kernel, policy):
    engine = Engine(built)
    engine.kernel = kernel
    return [score.logprob for scored in engine.score(DOCUMENTS, [policy])[0].scores for score in scored]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
@pytest.mark.parametrize("name", ["full", "h2o", "tova"])
def test_results_are_those_of_sdpa(calls, family, name):
    built, policy = model(family), build(name, "100%" if name == "full" else "30%")
    assert scores(built, "flash", policy) == pytest.approx(scores(built, "sdpa", policy), abs=1e-10)


def test_all_prompts_of_a_row_go_in_one_call_a_layer(calls):
    scores(tiny(), "flash", build("full"))
    assert len(calls) == tiny().config.num_hidden_layers - 1  # what the last one would make of prompts nobody reads
    assert sorted(calls[0]) == [11, 29, 44]  # two documents have one prompt


def test_layers_with_sinks_do_without(calls):
    built = model("gpt_oss")
    assert scores(built, "flash", build("full")) == pytest.approx(scores(built, "sdpa", build("full")), abs=1e-10)
    assert not calls
