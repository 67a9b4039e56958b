"""The recall model's first layer, told to look by places alone: its keys, what training may not change, and the page being filled."""

import random
from typing import Any

import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from evalkit.retention.recall_depth import PAGE, SHARE
from evalkit.retention.recall_places import LOUD, SLOW, Places
from evalkit.retention.recall_start import GROUPS, HEAD, HEADS, SPEEDS, build
from tests.test_recall import conversation, loaded, rows


@torch.no_grad()
def keys(model: Any) -> torch.Tensor:
    """[tokens, G x D] the first layer's keys, before they turn."""
    layer = model.model.layers[0]
    found: torch.Tensor = layer.self_attn.k_proj(layer.input_layernorm(model.model.embed_tokens.weight))
    return found


def test_all_keys_become_the_mean_key_and_stay_so() -> None:
    maker, _ = rows()
    model = build(0)
    tokens = maker.copies(256, random.Random(1)).ids
    before = keys(model)
    places = Places(model, tokens)
    one = keys(model)
    assert torch.allclose(one, one[:1].expand_as(one), atol=1e-4)
    assert functional.cosine_similarity(one[0], before[tokens].mean(0), dim=0) > 0.9
    layer = model.model.layers[0]
    assert not layer.self_attn.k_proj.weight.requires_grad and not layer.input_layernorm.weight.requires_grad
    kept = layer.self_attn.q_proj.weight.clone()
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, layer.self_attn.q_proj.weight):
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.01
    assert not torch.allclose(keys(model), one, rtol=1e-3)
    places.hold()
    assert torch.allclose(keys(model), one, rtol=1e-3, atol=1e-3)
    held = [head * HEAD + plane + side for head in LOUD for plane in SLOW for side in (0, HEAD // 2)]
    now = layer.self_attn.q_proj.weight
    assert torch.equal(now[held], kept[held]) and not torch.equal(now, kept)


def test_queries_score_higher_with_keys_that_are_near() -> None:
    model = build(0)
    Places(model, [*range(5, 200)])
    layer, planes = model.model.layers[0], torch.tensor([*SLOW])
    with torch.no_grad():
        query = layer.self_attn.q_proj(layer.input_layernorm(model.model.embed_tokens.weight[7])).view(HEADS, 2, -1)
    key = keys(model)[7].view(GROUPS, 2, -1)
    for head in LOUD:
        asked, told = query[head][:, planes], key[head * GROUPS // HEADS][:, planes]
        scores = [
            float(sum(turned(asked, SPEEDS[planes] * far)[side] @ told[side] for side in (0, 1))) for far in (1, 8, 16, 64, 200)
        ]
        assert scores == sorted(scores, reverse=True) and scores[0] - scores[-1] > scores[0] / 2


def turned(pair: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cosine, sine = angles.cos(), angles.sin()
    return pair[0] * cosine - pair[1] * sine, pair[1] * cosine + pair[0] * sine


def test_the_shipped_models_first_layer_looks_by_places() -> None:
    one = keys(loaded()[0])
    assert torch.allclose(one, one[:1].expand_as(one), atol=1e-3)


def test_in_the_shipped_model_the_page_being_filled_is_among_those_that_promise_most() -> None:
    ids = conversation_ids(900)
    query, key = turned_heads(ids)
    read = []
    for place in range(300, len(ids)):
        past = key[:, :place]
        for group in range(GROUPS):
            asked = query[2 * group : 2 * group + 2, place]
            pages = past[group].split(PAGE)
            bounds = [float(torch.maximum(asked * page.amax(0), asked * page.amin(0)).sum(1).max()) for page in pages]
            if place % PAGE:
                read.append(sorted(bounds)[-(int(SHARE * place) // PAGE)] <= bounds[-1])
    assert sum(read) > 0.99 * len(read) > 0


def conversation_ids(tokens: int) -> list[int]:
    """The first tokens of a built-in conversation."""
    messages = [message for message in conversation() if message["content"]]
    ids: list[int] = loaded()[1].apply_chat_template(messages, return_dict=True)["input_ids"]
    assert len(ids) >= tokens
    return ids[:tokens]


@torch.no_grad()
def turned_heads(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, T, D] and [G, T, D], the first layer's queries and keys, turned by their places."""
    model, places = loaded()[0].model, torch.arange(len(ids))[None]
    layer, given = model.layers[0], model.embed_tokens(torch.tensor([ids]))
    cosine, sine = model.rotary_emb(given, places)
    given = layer.input_layernorm(given)
    query, key = (part(given).unflatten(2, (-1, HEAD)).transpose(1, 2) for part in (layer.self_attn.q_proj, layer.self_attn.k_proj))
    query, key = apply_rotary_pos_emb(query, key, cosine, sine)
    return query[0], key[0]
