"""Every supported family computes what transformers does, every policy works on it or says no; others are refused by name."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from evalkit import attention, contract, policies
from evalkit.documents import Document
from evalkit.errors import UsageError
from evalkit.kernels import rotated
from evalkit.policies import build
from evalkit.policy import Policy
from evalkit.scoring import CellScores
from evalkit.session import Engine
from evalkit.trial import Trial
from tests import tiny

WINDOWED = ("mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss")
TURNING = [family for family in tiny.FAMILIES if family != "opt"]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with tiny.exact():
        yield


pytestmark = pytest.mark.usefixtures("own_cache")


@cache
def model(family: str) -> PreTrainedModel:
    return tiny.model(family)


def documents() -> list[Document]:
    """Lengths on both sides of the window and the crossing, answers that cross it, shared beginnings, a prompt of one token."""
    draw = tiny.tokens
    long = draw(30, 1)
    return [
        Document(long, (draw(1, 2), draw(5, 3), draw(3, 4))),
        Document(long[:20] + draw(9, 5), (draw(4, 6),)),
        Document(draw(1, 7), (draw(6, 8), draw(2, 9))),
        Document(draw(20, 10), (draw(2, 11), draw(9, 12), (5, 6, 7), (5, 6, 8))),
        Document(draw(tiny.CROSSING, 13), (draw(1, 14), draw(3, 15))),
    ]


def transformers_logprob(family: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """What the model's own forward says of one sequence; a model of its own, since some remember the longest sequence."""
    with torch.no_grad():
        logits = tiny.model(family)(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum())


@cache
def expected(family: str) -> list[list[float]]:
    return [[transformers_logprob(family, document.prompt, answer) for answer in document.answers] for document in documents()]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_full_cache_scores_as_transformers_does(family: str, attn: str) -> None:
    scored = Engine(tiny.model(family), attn).score(documents(), [build("full")])[0].scores
    for row, wanted in zip(scored, expected(family), strict=True):
        assert [one.logprob for one in row] == pytest.approx(wanted, abs=1e-10)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_documents_scored_alone_and_in_chunks_are_scored_as_transformers_does(family: str) -> None:
    engine = Engine(model(family), row_tokens=1, prefill_chunk=7)
    for document, wanted in zip(documents(), expected(family), strict=True):
        scored = engine.score([document], [build("full")])[0].scores[0]
        assert [one.logprob for one in scored] == pytest.approx(wanted, abs=1e-10)


@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_generation_is_transformers_greedy_generation(family: str, length: int) -> None:
    prompt = tiny.tokens(length, 20 + length)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = tiny.model(family).generate(torch.tensor([prompt]), **settings)[0, length:].tolist()
    session = Engine(model(family)).open(build("full"))
    session.feed(prompt)
    assert session.generate(8, lambda said: False) == wanted


def test_generation_that_would_have_to_rotate_what_is_held_anew_is_refused() -> None:
    session = Engine(model("phi3 longrope")).open(build("full"))
    session.feed(tiny.tokens(tiny.CROSSING - 2))
    with pytest.raises(UsageError, match="at 25 tokens this phi3 model rotates all keys anew"):
        session.generate(8, lambda said: False)


def test_answers_that_would_have_to_rotate_what_is_held_anew_are_refused() -> None:
    session = Engine(model("llama dynamic")).open(build("full"))
    session.feed(tiny.tokens(tiny.CROSSING))
    assert session.score([tiny.tokens(1, 1)])[0].logprob < 0
    with pytest.raises(UsageError, match="at 27 tokens this llama model rotates all keys anew"):
        session.score([tiny.tokens(1, 1), tiny.tokens(4, 2)])


@pytest.mark.parametrize("family", TURNING)
def test_rotating_a_key_on_makes_it_the_key_of_a_later_position(family: str) -> None:
    kinds = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]} if family == "gemma3_text" else {}
    line, more = tiny.tokens(30, 31), tiny.tokens(4, 32)
    for settings in ({}, kinds):  # of gemma3, layers of both kinds
        keys = []
        for prompt in (line + more, more + line):  # of one length, where the rotation follows that
            session = Engine(tiny.model(family, **settings)).open(build("full"))
            session.feed((*prompt, 3))
            keys.append(session.caches[0].entries.dense()[0])
        rope = session.caches[0].layer.rope
        assert rope is not None
        turned = rotated(keys[0][:, :, :30], torch.full((1, keys[0].shape[1], 30), 4), rope)
        torch.testing.assert_close(turned, keys[1][:, :, 4:], rtol=0, atol=1e-6)
        assert (turned - keys[0][:, :, :30]).abs().max() > 0.1


# Policies


SHORT = [
    Document(tiny.tokens(3, 41), (tiny.tokens(2, 42),)),
    Document(tiny.tokens(14, 44), (tiny.tokens(1, 45), tiny.tokens(2, 46))),
]


@cache
def known(family: str) -> dict[tuple[Policy, str], CellScores]:
    """What was scored on a family so far: the full cache's scores are the same for every policy."""
    return {}


REFUSED = {("streaming_llm", "opt"): "rotates keys to new positions and opt models do not rotate them"}


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("name", policies.shipped())
def test_every_policy_keeps_the_contract_in_short_or_refuses(name: str, family: str) -> None:
    trial = Trial(lambda budget: build(name, budget), model(family), SHORT, known(family))
    if (name, family) in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[name, family]):
            trial.main.cell(trial.whole)
        return
    by_token = (contract.answers_at_once_equal_answers_token_by_token, contract.stream_equals_one_token_at_a_time)
    for check in (contract.a_full_budget_is_the_full_cache, by_token["stream" in trial.protocols]):
        finding = contract.find(check, trial)
        assert finding.passed, f"{finding.name}: {finding.detail}"


@pytest.mark.parametrize("family", WINDOWED)
def test_a_windowed_layers_budget_is_a_share_of_what_its_window_can_hold(family: str) -> None:
    session = Engine(model(family)).open(build("h2o", "50%"))
    session.feed(tiny.tokens(31, 51))
    windows = [held.layer.window for held in session.caches]
    assert tiny.WINDOW in windows
    for held in session.caches:
        allowed = 15 if held.layer.window is None else tiny.WINDOW // 2
        assert int(held.allowance) == allowed
        assert held.counts.tolist() == [[allowed] * held.positions.shape[1]]
        assert held.layer.window is None or int(held.positions[held.filled].min()) >= 30 - tiny.WINDOW


def test_an_absolute_budget_is_the_window_at_most() -> None:
    session = Engine(model("gemma2")).open(build("h2o", 20))
    session.feed(tiny.tokens(31, 51))
    assert sorted({(held.layer.window, int(held.allowance)) for held in session.caches}, key=str) == [(12, 12), (None, 20)]


def test_a_second_engine_on_a_model_guesses_as_the_first_did() -> None:
    fresh, policy = tiny.model("llama"), build("infinigen", "30%")
    scores = [Engine(fresh, calibration=lambda: tiny.tokens(60)).score(documents(), [policy])[0].scores for _ in range(2)]
    assert scores[0] == scores[1]


# What is refused


ODD = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "t5": {"d_model": 32, "num_layers": 2, "num_heads": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
}


@pytest.mark.parametrize("kind", ODD)
def test_other_model_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UsageError, match=f"models of type '{kind}'.* are not supported.*use one of gemma2, gemma3_text"):
        attention.check(AutoConfig.for_model(kind, **ODD[kind]))


def test_an_engine_refuses_what_it_cannot_compute() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=64, **ODD["bloom"])
    with pytest.raises(UsageError, match="models of type 'bloom' are not supported"):
        Engine(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["sliding_attention", "chunked_attention"] * 2}, "chunked_attention"),
    ],
)
def test_a_supported_type_with_other_attention_is_refused_by_what_is_other(settings: dict[str, object], named: str) -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=4)
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(UsageError, match=f"models of type 'gemma3_text' with {named} are not supported"):
        attention.check(config)


def test_an_unknown_kernel_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"attn=sdap is not known \(did you mean 'sdpa'\?\): give one of sdpa, flash, eager"):
        Engine(model("llama"), "sdap")


def test_flash_is_refused_where_there_is_no_cuda() -> None:
    with pytest.raises(UsageError, match="attn=flash needs a CUDA device and the model is on cpu: give attn=sdpa"):
        Engine(model("llama"), "flash")
