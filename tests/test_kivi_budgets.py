"""KIVI under budgets: which form fits, and what it then takes."""

from dataclasses import replace

import pytest
import torch
from references import kivi as twin

from evalkit.cache import LayerCache
from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.layer import Layer
from evalkit.model import tiny
from evalkit.policies import build
from evalkit.policies._codes import Layout
from evalkit.policies.kivi import cost, largest
from evalkit.session import Engine
from evalkit.shares import BYTES, DENSE_BYTES
from tests.test_kivi import filled, grown_by, normal


@pytest.mark.parametrize("share", ["18.75%", "20%", "0.25", "31.25%", "0.4", "0.5", "0.75", "0.95"])
@pytest.mark.parametrize("tokens", [20, 33, 100, 256, 640, 1000])
def test_a_budget_chooses_what_the_twin_chooses(share, tokens):
    allowance = build("kivi", share).budget.allowance(tokens)
    form = largest(Layout.of(32, 64, 64), tokens, allowance, 4, None)
    assert form[:2] == twin.fitting(tokens, allowance, 32, 64)


@pytest.mark.parametrize("tokens", [300, 320])
@pytest.mark.parametrize("window", [None, 20, 48, 200])
@pytest.mark.parametrize("share", ["0.2", "0.45", "0.7"])
def test_the_bytes_held_are_those_the_choice_reckoned_with(share, window, tokens):
    policy, (keys, values) = build("kivi", share), normal(2, 1, 1, tokens, 64)
    allowance = policy.budget.allowance(tokens, window)
    held = filled(policy, keys, values, prompt=tokens, allowance=allowance, window=window)
    (part,) = held.entries.parts
    assert part.form == largest(part.layout, tokens, allowance, 4, window)
    assert int(held.cost()) == cost(part.layout, part.form, tokens, int(held.tokens))


@pytest.mark.parametrize(
    ("share", "tokens"), [("0.2", 1010), ("0.2", 1500), ("0.35", 300), ("0.35", 700), ("0.6", 200), ("0.6", 700)]
)
def test_long_prompts_are_held_in_their_share_of_the_bytes(share, tokens):
    engine, policy = Engine(tiny(head_dim=64, num_hidden_layers=1)), build("kivi", share)
    tally = engine.score([Document(tuple(i * 7 % 127 for i in range(tokens)), ((1,),))], [policy])[0].tally
    held = float(tally[BYTES] / tally[DENSE_BYTES])
    assert float(policy.budget.share) - 0.15 < held <= float(policy.budget.share)


def test_answers_come_on_top_in_the_form_chosen_for_the_prompt():
    policy, (keys, values) = build("kivi", "40%"), normal(2, 1, 1, 224, 64)
    held = filled(policy, keys, values, prompt=192, allowance=76)
    (part,) = held.entries.parts
    assert part.form == largest(part.layout, 192, 76, 4, None)
    assert part.form != largest(part.layout, 224, 76, 4, None)


def test_what_a_budget_grants_beyond_the_prompt_stays_in_full_precision():
    policy, (keys, values) = build("kivi", 64), normal(2, 1, 1, 64, 16)
    held = filled(policy, keys[:, :, :63], values[:, :, :63], prompt=20, allowance=64)
    assert all(map(torch.equal, held.entries.dense(), (keys[:, :, :63], values[:, :, :63])))


def test_token_by_token_bits_only_fall():
    policy, (keys, values) = build("kivi", "40%"), normal(2, 1, 1, 96, 64)
    held = replace(LayerCache.empty(Layer(), keys, 1), allowance=torch.tensor([40]))
    bits, afresh = [], []
    for now in range(96):
        held = grown_by(policy, held, keys[:, :, now : now + 1], values[:, :, now : now + 1], complete=True)
        (part,) = held.entries.parts
        assert int(held.cost()) <= 40 * 256
        bits.append(part.form.bits)
        afresh.append(largest(part.layout, now + 1, 40, 4, None).bits)
    assert bits == sorted(bits, reverse=True) != afresh


def test_a_prompt_shorter_than_a_group_takes_what_it_must():
    held = filled(build("kivi", "0.2"), *normal(2, 1, 1, 20, 64), prompt=20, allowance=4)
    assert int(held.cost()) == 20 * 128 + 40 * 12


@pytest.mark.parametrize(("given", "said"), [
    ({"budget": "10%"}, "below 18.75%"),
    ({"budget": "0.3", "group": 8}, "below 37.5%"),
    ({"budget": "50%", "bits": 2}, "give one of them"),
    ({"budget": 256, "bits": 4}, "give one of them"),
    ({"residual": 64}, "give bits=2 or bits=4 too"),
    ({"bits": 2, "residual": 100}, "multiple of group=32"),
    ({"bits": 3}, "bits"),
])  # fmt: skip
def test_what_cannot_be_held_is_refused_in_one_line(given, said):
    with pytest.raises(UsageError, match=said) as refusal:
        build("kivi", **given)
    assert "\n" not in str(refusal.value)


def test_presets_refuse_a_budget():
    assert build("kivi:2bit") == build("kivi", bits=2, residual=128, group=32)
    with pytest.raises(UsageError, match="give one of them"):
        build("kivi:4bit", "50%")


@pytest.mark.parametrize(
    ("policy", "tokens"), [(build("kivi:2bit"), 128), (build("kivi", bits=2, residual=0), 1), (build("kivi", "50%"), 2)]
)
def test_it_says_which_prompts_it_acts_on(policy, tokens):
    assert policy.acts_on(tokens)
    assert not policy.acts_on(tokens - 1)
