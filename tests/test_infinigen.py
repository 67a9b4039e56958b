"""InfiniGen: skew, channels, guesses and the entries fetched, against a slow twin and the authors' code."""

import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AttentionInterface

from evalkit import attention
from evalkit.cache import LayerCache
from evalkit.contract import run
from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.layer import Layer
from evalkit.model import tiny
from evalkit.policies import build
from evalkit.policies.infinigen import skewing
from evalkit.policy import Policy, top
from evalkit.session import Engine
from evalkit.shares import BYTES, DENSE_BYTES, FETCHED, FETCHED_BYTES, QUERIES, READ
from evalkit.trial import Trial, documents
from tests.authors.recording.tensors import given
from tests.references import infinigen as twin
from tests.tiny import FAMILIES, model, tokens

AUTHORS = Path(__file__).parent / "authors"
HEADS, GROUP, SIZE = 2, 3, 10


def cases(name):
    return json.loads((AUTHORS / f"{name}.json").read_text())["cases"]


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uncapped(name):
    """The authors' cases that keep every entry."""
    return pytest.mark.parametrize("case", [c for c in cases(name) if c["parameters"]["capacity"] == 1.0], ids=lambda c: c["name"])


def bits(mask):
    return ["".join("1" if entry else "0" for entry in row) for row in mask.tolist()]


def taken_in(policy, cache, keys):
    """The cache after a block of keys [B, H, T, D]."""
    return policy.observe(cache.append(keys, keys), keys[:, :, None])


def asked(policy, partial, keys, guess, allowance, scaling=1.0):
    """What a layer that holds keys [H, S, D] reads for the guess [H, G, D], [H, S]."""
    cache = replace(LayerCache.empty(Layer(index=2, scaling=scaling), keys[None], 1), prepared={"partial": partial})
    cache = replace(taken_in(policy, cache, keys[None]), guess=guess[None, :, :, None], allowance=torch.tensor([allowance]))
    return policy.read(cache, guess[None, :, :, None])[0, :, 0, 0]


# Preparation


@pytest.mark.parametrize("name", ["infinigen_skew", "infinigen_faster_skew"])
def test_the_skew_is_the_authors_up_to_sign(name):
    (case,) = cases(name)
    ours, theirs = skewing(given(case["inputs"]["queries"])[:, None]), torch.tensor(case["expected"]["skew"], dtype=torch.float64)
    turned = ours * (ours * theirs).sum(1, keepdim=True).sign()
    torch.testing.assert_close(turned, theirs, atol=2e-3, rtol=0)  # theirs are in half precision


def test_the_skew_changes_no_score():
    queries, keys = random(HEADS, GROUP, 30, SIZE, seed=1), random(HEADS, 30, SIZE, seed=2)
    every = build("infinigen", ratio=1.0).partial(queries, keys)
    before = torch.einsum("hgtd,hsd->hgts", queries, keys)
    after = torch.einsum("hgtr,hsr->hgts", queries @ every[:, None], keys @ every)
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("columns", ["sum", "union", "queries"])
def test_matrix_and_channels_are_the_twins(columns):
    queries, keys = random(HEADS, GROUP, 20, SIZE, seed=3), random(HEADS, 20, SIZE, seed=4)
    policy = build("infinigen", ratio=0.35, columns=columns)
    partial = policy.partial(queries, keys)
    for head in range(HEADS):
        matrix = twin.skew(queries[head].flatten(0, 1).numpy())
        used = twin.channels(queries[head].numpy() @ matrix, keys[head].numpy() @ matrix, 0.35, columns)
        own = partial[head][:, partial[head].any(0)].numpy()
        assert numpy.allclose(own @ own.T, matrix[:, sorted(used)] @ matrix[:, sorted(used)].T)  # the sign of a column is free


@pytest.mark.parametrize("case", cases("infinigen_channels"), ids=lambda case: case["name"])
def test_channels_joined_from_queries_and_keys_are_the_authors(case):
    queries, keys, skew = (given(case["inputs"][name], torch.float64) for name in ("queries", "keys", "skew"))
    policy = build("infinigen:repo", ratio=case["parameters"]["partial_weight_ratio"])
    assert bits(policy.wanted((queries @ skew)[:, None], keys @ skew)) == case["expected"]["channels"]


@pytest.mark.parametrize("case", cases("infinigen_faster_channels"), ids=lambda case: case["name"])
def test_channels_of_queries_alone_are_the_authors(case):
    queries = given(case["inputs"]["queries"], torch.float64)
    policy = build("infinigen:repo-faster", ratio=case["parameters"]["partial_weight_ratio"])
    chosen = policy.wanted(queries[:, None], queries)
    assert [head.nonzero().flatten().tolist() for head in chosen] == case["expected"]["channels"]


# The choice


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dense_start", [False, True])
def test_sequences_of_different_lengths_read_what_the_twin_reads(window, softcap, dense_start):
    policy = build("infinigen", 12, alpha=1.0, ratio=0.4, dense_start=dense_start)
    keys, lengths, allowance = random(3, HEADS, 50, SIZE, seed=5), [1, 9, 30], torch.tensor([3, 12, 6])
    queries = random(HEADS, GROUP, 20, SIZE, seed=6)
    matrices = [twin.skew(member.flatten(0, 1).numpy()) for member in queries]
    used = [
        twin.channels(member.numpy() @ matrix, own.numpy() @ matrix, 0.4)
        for member, matrix, own in zip(queries, matrices, keys[0, :, :20], strict=True)
    ]
    layer = Layer(index=2, scaling=0.3, window=window, softcap=softcap)
    partial = policy.partial(queries, keys[0, :, :20])
    empty = replace(LayerCache.empty(layer, keys[:1], 1), prepared={"partial": partial})
    rows = [taken_in(policy, empty, own[None, :, :length]) for own, length in zip(keys, lengths, strict=True)]
    cache = replace(LayerCache.stack(rows), allowance=allowance)
    for step in range(20):
        guess = random(3, HEADS, GROUP, 1, SIZE, seed=100 + step)
        mask = policy.read(replace(cache, guess=guess), guess) & cache.reach(cache.seen[:, None])
        for row, length in enumerate(lengths):
            expected = twin.read(
                guess[row, :, :, 0].numpy(), keys[row, :, : length + step].numpy(), matrices, used, scaling=0.3, alpha=1.0,
                allowance=int(allowance[row]), window=window, softcap=softcap, dense_start=dense_start,
            )  # fmt: skip
            got = {(h, int(cache.positions[row, h, s])) for h, s in mask[row, :, 0, 0].nonzero().tolist()}
            assert got == {tuple(map(int, where)) for where in zip(*expected.nonzero(), strict=True)}
        cache = taken_in(policy, cache, torch.stack([keys[row, :, n + step, None] for row, n in enumerate(lengths)])).expired()


@pytest.mark.parametrize("case", cases("infinigen_faster_choice"), ids=lambda case: case["name"])
def test_one_decoding_step_fetches_what_the_authors_faster_code_fetches(case):
    state, weights, keys = (given(case["inputs"][name], torch.float64) for name in ("hidden", "query_weights", "keys"))
    policy = build("infinigen", case["parameters"]["max_num_kv"], alpha=case["parameters"]["alpha"])
    every = torch.eye(3, dtype=torch.float64).expand(4, -1, -1)
    read = asked(policy, every, keys, (weights @ state).view(4, 1, 3), case["parameters"]["max_num_kv"])
    assert [head.nonzero().flatten().tolist() for head in read] == case["expected"]["read"]


@uncapped("infinigen_opt")
def test_rows_past_the_budget_read_what_the_authors_accuracy_code_reads(case):
    queries, keys = (given(case["inputs"][name], torch.float64) for name in ("queries", "keys"))
    cap, every = int(keys.shape[1] * case["parameters"]["budget"]), torch.eye(8, dtype=torch.float64).expand(4, -1, -1)
    policy = build("infinigen:repo", max(2, cap), alpha=case["parameters"]["alpha"])
    for row in range(cap, keys.shape[1]):
        read = asked(policy, every, keys[:, : row + 1], queries[:, None, row], cap, 8**-0.5)  # a row is its own candidate there
        assert bits(read) == [head[row][: row + 1] for head in case["expected"]["mask"]]


@uncapped("infinigen_llama")
def test_the_llama_file_reads_the_same_best_entries_but_other_numbers_of_them(case):
    """There, the first head's highest score is every head's, so only the order of entries can agree."""
    queries, keys = (given(case["inputs"][name], torch.float64) for name in ("queries", "keys"))
    scores = queries @ keys.transpose(1, 2)
    for row in range(int(keys.shape[1] * case["parameters"]["budget"]), keys.shape[1]):
        expected = [head[row][: row + 1] for head in case["expected"]["mask"]]
        own = scores[:, row, : row + 1]
        assert bits(top(own, expected[0].count("1"), torch.ones_like(own, dtype=torch.bool))) == expected


def test_a_whole_layer_of_the_authors_code_guesses_as_ours():
    """Of the Llama file too, so as many entries are compared as it reads."""
    (case,) = cases("infinigen_attention")
    inputs = {name: given(described, torch.float64) for name, described in case["inputs"].items()}
    spread = lambda states, weights: rotated((states @ weights.T).view(24, 2, 128).transpose(0, 1))  # noqa: E731
    guesses, keys = spread(inputs["previous"], inputs["q"]), spread(inputs["hidden"], inputs["k"])
    partial = inputs["skew"] * (inputs["channels"] > case["parameters"]["channels_above"])[:, None]
    policy, most = build("infinigen", 24, alpha=torch.inf), int(24 * case["parameters"]["budget"])
    for row in range(most, 24):
        expected = [head[row][: row + 1] for head in case["expected"]["mask"]]
        read = asked(policy, partial, keys[:, : row + 1], guesses[:, None, row], expected[0].count("1"), 128**-0.5)
        assert bits(read) == expected


def rotated(states):
    """Rotary positions 0, 1, ... for [H, T, D], base 10000."""
    half = states.shape[2] // 2
    angles = torch.arange(states.shape[1])[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    low, high = states[..., :half], states[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


def test_a_sequence_no_longer_than_its_allowance_is_read_whole_only_where_asked():
    keys, guess = random(HEADS, 6, SIZE, seed=7), 9 * random(HEADS, GROUP, SIZE, seed=8)
    every = torch.eye(SIZE, dtype=torch.float64).expand(HEADS, -1, -1)
    chosen, whole = (asked(build("infinigen", 8, dense_start=start), every, keys, guess, 8).sum() for start in (False, True))
    assert chosen < whole == HEADS * 6


@pytest.mark.parametrize("alpha", [-0.5, float("nan")])
def test_a_distance_below_zero_is_refused(alpha):
    with pytest.raises(UsageError, match=f"alpha={alpha} is not allowed: give a distance between scores, 0 or more"):
        build("infinigen", alpha=alpha)


# In the engine


@dataclass(frozen=True, kw_only=True)
class Listening(Policy):
    """Notes the guesses it is handed, by layer, as (sequence length, guess)."""

    heard: dict = field(default_factory=dict, hash=False, compare=False)
    needs = frozenset({"guess"})

    def read(self, cache, query):
        self.heard.setdefault(cache.layer.index, []).append(cache.guess)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_guess_is_the_layers_query_of_the_previous_layers_input(family):
    ours, text, policy = model(family), tokens(23), Listening()
    theirs = deepcopy(ours)
    Engine(ours).score([Document(text, ((5,),))], [policy], "stream")
    inputs = inputs_of(theirs, text)
    theirs.set_attn_implementation("listening")
    for index, module in enumerate(attention.layers(theirs)[1:], start=1):
        given_to = {**inputs[index], "hidden_states": inputs[index - 1]["hidden_states"]}
        with pytest.raises(Heard) as heard:
            module(**given_to)
        (expected,) = heard.value.args
        got = torch.cat(policy.heard[index], dim=3)[0].flatten(0, 1)  # of every token after the first
        torch.testing.assert_close(got, expected[0, :, 1:], atol=1e-4, rtol=1e-4)  # its softmax is in single precision
    assert policy.heard[0] == [None] * 22


def inputs_of(theirs, text):
    """What transformers' own forward hands to each attention layer."""
    inputs, names = [], ("hidden_states", "position_embeddings")
    keep = lambda module, args, kwargs: inputs.append({**dict(zip(names, args, strict=False)), **kwargs})  # noqa: E731
    for module in attention.layers(theirs):
        module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        theirs(torch.tensor([text]), use_cache=False)
    return list(inputs)


class Heard(Exception):
    pass


def listening(module, query, key, value, attention_mask, **options):
    raise Heard(query.detach())


AttentionInterface.register("listening", listening)


@pytest.mark.parametrize("name", ["infinigen:repo", "infinigen:repo-faster"])
def test_presets_keep_the_contract(name):
    assert [finding for finding in run(Trial(lambda budget: build(name, budget, ratio=0.4))) if not finding.passed] == []


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "opt"])
def test_it_keeps_the_contract_with_soft_caps_sinks_windows_and_unrotated_keys(family):
    trial = Trial(lambda budget: build("infinigen", budget), model(family, num_key_value_heads=4 if family == "opt" else 2))
    assert [finding for finding in run(trial) if not finding.passed] == []


def test_all_that_is_read_is_fetched_and_partial_keys_count_in_the_bytes():
    engine = Engine(tiny(), calibration=lambda: tokens(60))
    one, most = (result.tally.sum(1) for result in engine.score(documents(), [build("infinigen", b) for b in ("5%", "60%")]))
    size, channels, layers, heads = 8, 1, 3, 2
    assert 0 < one[READ] < most[READ]
    assert one[FETCHED] == one[READ] - heads * layers * one[QUERIES]  # the newest token is not in host memory yet
    assert one[FETCHED_BYTES] == one[FETCHED] * 2 * size * 2
    assert one[BYTES] == pytest.approx(float(one[DENSE_BYTES]) * (1 + channels / (2 * size) / layers))  # one layer of three chooses
