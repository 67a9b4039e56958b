"""KIVI: codes, packed storage, its bytes, and when entries are coded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from references import kivi as twin

from evalkit.cache import LayerCache
from evalkit.documents import Document
from evalkit.entries import Plain
from evalkit.layer import Layer
from evalkit.model import tiny
from evalkit.policies import build
from evalkit.policies._codes import Layout, decode, encode, pack, unpack
from evalkit.policies._packed import Packed
from evalkit.session import Engine
from tests.authors.recording.tensors import drawn, given
from tests.tiny import model

AUTHORS = Path(__file__).parent / "authors"


def cases(name):
    return json.loads((AUTHORS / f"{name}.json").read_text())["cases"]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def filled(policy, keys, values, *, prompt, allowance=None, window=None):
    """Take in the first `prompt` tokens whole and the others one by one."""
    granted = None if allowance is None else torch.full((len(keys),), allowance)
    held = replace(LayerCache.empty(Layer(window=window), keys, len(keys)), allowance=granted)
    held = policy.write(held.append(keys[:, :, :prompt], values[:, :, :prompt]))
    return grown_by(policy, held, keys[:, :, prompt:], values[:, :, prompt:])


def grown_by(policy, held, keys, values, *, complete=False):
    """Take in tokens one by one; under `complete` each ends a message, as in a stream."""
    for now in range(keys.shape[2]):
        more = keys[:, :, now : now + 1], values[:, :, now : now + 1]
        held = policy.write(held.append(*more, decoding=True, complete=complete)).expired()
    return held


# Codes


@pytest.mark.parametrize("case", cases("kivi"), ids=lambda case: case["name"])
def test_codes_are_the_authors(case):
    (kind, described), bits, group = *case["inputs"].items(), case["parameters"]["bits"], case["parameters"]["group_size"]
    numbers = given(described, getattr(torch, case["parameters"]["dtype"]))[None]
    layout = Layout.of(group, numbers.shape[3], numbers.shape[3])
    groups = layout.of_keys(numbers) if kind == "keys" else layout.of_values(numbers)
    coded = encode(groups, bits)
    flat = lambda each: (each.transpose(3, 4).flatten(2, 3) if kind == "keys" else each.flatten(3))[0]  # noqa: E731
    expected = {name: torch.tensor(what, dtype=numbers.dtype) for name, what in case["expected"].items()}
    assert torch.equal(flat(unpack(coded.codes, bits)[..., :group]).to(numbers.dtype), expected["codes"])
    for name, found in (("scales", coded.scale[0]), ("least", coded.least[0]), ("restored", flat(decode(coded, bits, group)))):
        torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("size", [1, 3, 8, 20, 32])
def test_packing_loses_no_code(bits, size):
    codes = torch.randint(0, 2**bits, (3, 5, size), generator=torch.Generator().manual_seed(size)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 5, -(-size * bits // 8))
    assert torch.equal(unpack(packed, bits)[..., :size], codes)


def test_a_group_of_equal_numbers_is_restored_as_it_was():
    numbers = torch.full((1, 1, 2, 3, 8), 0.7)
    assert torch.equal(decode(encode(numbers, 2), 2, 8), numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_entries_stay_in_the_dtype_they_came_in(dtype):
    keys, values = normal(2, 1, 2, 40, 8, dtype=dtype)
    held = filled(build("kivi", bits=4, residual=8, group=8), keys, values, prompt=30)
    for met, came in zip(held.entries.dense(), (keys, values), strict=True):
        assert met.dtype == dtype
        assert 0 < (met - came).abs().max() < 0.3


# When entries are coded


@pytest.mark.parametrize("case", cases("kivi_flush"), ids=lambda case: case["name"])
def test_entries_are_coded_when_the_authors_code_them(case):
    settings = case["parameters"]
    policy = build("kivi", bits=settings["k_bits"], residual=settings["residual_length"], group=settings["group_size"])
    query, keys, values = (each[None] for each in drawn(case["inputs"], torch.float64))
    held = LayerCache.empty(Layer(scaling=query.shape[3] ** -0.5), keys, 1)
    found = {"coded_keys": [], "coded_values": [], "outputs": []}
    for start, stop in ((0, settings["prompt"]), *((now, now + 1) for now in range(settings["prompt"], 40))):
        held = held.append(keys[:, :, start:stop], values[:, :, start:stop], decoding=start > 0, complete=start == 0)
        output = held.weights(query[:, :, None, stop - 1 : stop])[:, :, 0] @ held.entries.dense()[1]
        held = policy.write(held)
        (part,) = held.entries.parts
        found["coded_keys"].append(stop - part.keys.shape[2])
        found["coded_values"].append(stop - part.values.shape[2])
        found["outputs"].append(output[0, :, 0])
    assert (found["coded_keys"], found["coded_values"]) == (case["expected"]["coded_keys"], case["expected"]["coded_values"])
    expected = torch.tensor(case["expected"]["outputs"], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(found["outputs"]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt", [1, 32, 45, 70])
@pytest.mark.parametrize(("bits", "residual", "group", "size"), [(2, 16, 8, 16), (4, 32, 16, 16), (2, 0, 8, 12), (4, 8, 4, 10)])
def test_what_queries_meet_is_what_the_twin_says(prompt, bits, residual, group, size):
    keys, values = normal(2, 2, 2, 70, size)
    held = filled(build("kivi", bits=bits, residual=residual, group=group), keys, values, prompt=prompt)
    for met, came, say in zip(held.entries.dense(), (keys, values), (twin.keys_met, twin.values_met), strict=True):
        expected = [torch.from_numpy(say(head.numpy(), bits, group, residual)) for head in came.flatten(0, 1)]
        torch.testing.assert_close(met.flatten(0, 1), torch.stack(expected), rtol=0, atol=1e-12)


# Bytes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # a head's 8 x 64 groups of keys and 44 keys in full, 172 x 2 groups of values and 128 values in full
        ({"bits": 2}, 512 * 12 + 44 * 128 + 344 * 12 + 128 * 128),
        ({"bits": 4}, 512 * 20 + 44 * 128 + 344 * 20 + 128 * 128),
        # 9 x 64 groups of keys and 12 keys in full, all values in groups
        ({"bits": 2, "residual": 0}, 576 * 12 + 12 * 128 + 600 * 12),
    ],
)
def test_bytes_are_codes_scales_least_numbers_and_residual(settings, expected):
    held = filled(build("kivi", **settings), *normal(2, 3, 2, 300, 64), prompt=300)
    assert held.cost().tolist() == [2 * expected] * 3
    (part,) = held.entries.parts
    stored = sum(tensor.numel() * (1 if tensor.dtype == torch.uint8 else 2) for tensor in part.tensors)
    assert stored == 3 * 2 * expected


def test_what_was_coded_is_let_go_in_full_precision():
    held = filled(build("kivi", bits=2), *normal(2, 1, 2, 300, 64), prompt=300)
    (part,) = held.entries.parts
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in part.tensors)


# On models


def prompts():
    shapes = [(30, (1, 1, 5)), (12, (7, 3)), (27, (8, 4)), (5, (1, 2)), (1, (6,)), (40, (9, 9, 2)), (33, (30,))]
    draw = torch.Generator().manual_seed(1)
    words = lambda count: tuple(torch.randint(1, 128, (count,), generator=draw).tolist())  # noqa: E731
    first = [Document(words(prompt), tuple(words(answer) for answer in answers)) for prompt, answers in shapes]
    forked = [Document(words(length), ((1, 2, 3, *words(4)), (1, 2, 4, *words(4)))[: 1 + length % 2]) for length in (28, 29)]
    branching = [
        Document(words(length), ((*stem, 5, 6, 7), (*stem, 8, 9, 10))) for length, stem in ((26, words(4)), (28, words(2)))
    ]
    return [*first, *forked, *branching]


def one_by_one(engine, policy, document, answer):
    """Score an answer token by token after a prompt taken in whole."""
    session, total = engine.open(policy), 0.0
    session.feed(document.prompt)
    for token in answer:
        logits = session.step(session.waiting, None if session.state.caches else document.basis, 1)[-1]
        session.seen, session.waiting = session.seen + 1, (token,)
        total += float(logits.log_softmax(-1)[token])
    return total


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"budget": "50%", "group": 8}),
        ("llama", {"bits": 2, "residual": 8, "group": 8}),
        ("mistral", {"budget": 20, "group": 4}),  # layers with a sliding window of 12
    ],
)
def test_packed_rows_equal_each_alone_and_token_by_token(family, settings):
    engine, documents, policy = Engine(model(family)), prompts(), build("kivi", **settings)
    together, full = (result.scores for result in engine.score(documents, [policy, build("full")]))
    for document, scores in zip(documents, together, strict=True):
        alone = engine.score([document], [policy])[0].scores[0]
        stepped = [one_by_one(engine, policy, document, answer) for answer in document.answers]
        assert [score.logprob for score in scores] == pytest.approx([score.logprob for score in alone], abs=1e-9)
        assert [score.logprob for score in scores] == pytest.approx(stepped, abs=1e-9)
    assert max(abs(x.logprob - y.logprob) for x, y in zip(together[5], full[5], strict=True)) > 1e-3


@pytest.mark.parametrize("protocol", ["prompt", "stream"])
def test_a_full_budget_is_the_full_cache(protocol):
    engine, documents = Engine(tiny()), prompts()
    for one, full in zip(
        *(result.scores for result in engine.score(documents, [build("kivi"), build("full")], protocol)), strict=True
    ):
        assert [score.logprob for score in one] == pytest.approx([score.logprob for score in full], abs=1e-9)


def test_a_conversation_goes_on_in_codes():
    engine, policy, document = Engine(tiny()), build("kivi", "50%", group=8), prompts()[5]
    session, full = engine.open(policy), engine.open(build("full"))
    for each in (session, full):
        each.feed(document.prompt)
        each.feed(document.answers[0], decoded=True)
        each.feed(document.prompt)
    held, whole = session.caches[0], full.caches[0]
    assert int(held.seen[0]) == held.slots == 40 + 9 + 40 - 1
    for met, came in zip(held.entries.dense(), whole.entries.dense(), strict=True):  # of the first layer, which is fed alike
        assert 0 < (met - came).abs().max() < 0.5 * came.abs().max()
    assert int(held.cost()) <= 0.5 * int(whole.cost())
    assert session.score(document.answers) != full.score(document.answers)


def test_a_fork_leaves_the_session_alone():
    session = Engine(tiny()).open(build("kivi", "50%", group=8))
    session.feed(prompts()[5].prompt)
    before = [tensor.clone() for held in session.caches for tensor in held.entries.dense()]
    answers = prompts()[5].answers
    scores, fork = session.score(answers), session.fork()
    fork.generate(12, lambda said: False)
    fork.feed(prompts()[0].prompt)
    assert all(map(torch.equal, before, [tensor for held in session.caches for tensor in held.entries.dense()]))
    assert session.score(answers) == scores


# The storage itself


def test_more_bits_restore_what_fewer_bits_hold():
    policy, (keys, values) = build("kivi", "40%", group=32), normal(2, 1, 2, 50, 64)
    held = filled(policy, keys, values, prompt=50, allowance=20)
    longer = held.append(*normal(2, 1, 2, 200, 64, seed=2))
    longer = policy.write(replace(longer, allowance=torch.tensor([100])))
    assert [each.entries.parts[0].form.bits for each in (held, longer)] == [2, 4]
    coded = held.entries.parts[0].coded_keys.length * 32, held.entries.parts[0].coded_values.length
    for before, after, count in zip(held.entries.dense(), longer.entries.dense(), coded, strict=True):
        assert count
        torch.testing.assert_close(after[:, :, :count], before[:, :, :count], rtol=0, atol=1e-12)


def test_sequences_stored_unlike_stand_side_by_side():
    policy, (keys, values) = build("kivi", "50%", group=8), normal(2, 5, 2, 31, 8)
    alone = [
        filled(policy, keys[row : row + 1], values[row : row + 1], prompt=prompt, allowance=allowance)
        for row, (prompt, allowance) in enumerate([(30, 15), (31, 22), (30, 30), (30, 38), (30, 15)])
    ]
    together = LayerCache.stack(alone)
    assert [list(here) for here in together.entries.places] == [[0, 4], [1], [2], [3]]
    order = [2, 0, 1, 0, 3]
    grown, more = together.rows(torch.tensor(order)), normal(2, 5, 2, 3, 8, seed=2)
    grown = grown_by(policy, grown, *more)
    for place, row in enumerate(order):
        one = grown_by(policy, alone[row], *more[:, place : place + 1])
        for mine, own in zip(grown.entries.dense(), one.entries.dense(), strict=True):
            assert torch.equal(mine[place : place + 1, :, -one.slots :], own)
        assert int(grown.cost()[place]) == int(one.cost())


def test_sequences_granted_unlike_are_stored_unlike():
    policy, (keys, values) = build("kivi", "50%", group=8), normal(2, 4, 2, 30, 8)
    grants = torch.tensor([15, 22, 30, 15])
    held = replace(LayerCache.empty(Layer(), keys, 4), allowance=grants).append(keys, values)
    together = policy.write(held)
    assert [list(here) for here in together.entries.places] == [[0, 3], [1], [2]]
    for row in range(4):
        one = policy.write(held.rows(torch.tensor([row])))
        assert all(torch.equal(mine[row], own[0]) for mine, own in zip(together.entries.dense(), one.entries.dense(), strict=True))
        assert int(together.cost()[row]) == int(one.cost()) <= int(grants[row]) * 2 * 32


@pytest.mark.parametrize(
    ("window", "key_groups", "full_keys", "full_values"),
    [
        (6, 0, 6, 6),  # no keys are coded: a group never comes together
        (20, 2, 10, 16),  # positions 70 to 89: of the keys 72 to 79 and the group around 70 are coded
    ],
)
def test_entries_that_a_window_has_passed_are_dropped(window, key_groups, full_keys, full_values):
    policy, (keys, values) = build("kivi", bits=2, residual=16, group=8), normal(2, 2, 2, 90, 8)
    held, whole = (filled(policy, keys, values, prompt=30, window=each) for each in (window, None))
    assert held.slots < 2 * window + 8
    live = held.filled[0, 0].nonzero()[:, 0]
    assert held.positions[0, 0, live].tolist() == list(range(90 - window, 90))
    met_keys, met_values = held.entries.dense()
    assert met_keys.shape == met_values.shape
    assert torch.equal(met_keys[:, :, live], (whole.entries.dense()[0] if key_groups else keys)[:, :, -window:])
    assert torch.equal(met_values[:, :, live], whole.entries.dense()[1][:, :, -window:])
    coded_values = window - full_values
    assert held.cost().tolist() == [2 * (key_groups * 8 * 6 + full_keys * 16 + coded_values * 6 + full_values * 16)] * 2


def test_a_choice_among_entries_is_held_in_full_precision():
    held = filled(build("kivi", bits=2, residual=8, group=8), *normal(2, 1, 2, 40, 8), prompt=40)
    wanted = torch.zeros(1, 2, 40, dtype=torch.bool)
    wanted[:, :, [3, 7, 20, 39]] = True
    kept = held.keep(wanted)
    assert isinstance(held.entries, Packed)
    assert isinstance(kept.entries, Plain)
    for before, after in zip(held.entries.dense(), kept.entries.dense(), strict=True):
        assert torch.equal(after, before[:, :, [3, 7, 20, 39]])
    assert int(kept.cost()) == 2 * 4 * 2 * 8 * 2
