"""What is prepared on the calibration text: recorded as the model attends, kept on disk, made anew when anything changed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from evalkit import calibration
from evalkit.calibration import LONGEST, prepared, text
from evalkit.counters import Counters
from evalkit.errors import UsageError
from evalkit.kernels import rotated
from evalkit.model import tiny
from evalkit.policy import Model, Policy
from evalkit.rooms import room
from evalkit.session import Engine

TEXT = tuple(range(1, 31))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder that prepared tensors are kept in."""
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    return tmp_path / "prepared"


@dataclass(frozen=True, kw_only=True)
class Learning(Policy):
    """Prepares each layer's mean key and the number of its queries, and counts how often it is asked to."""

    scale: float = 1.0
    asked: ClassVar[list[int]] = []

    def prepare(self, model: Model) -> list[Mapping[str, torch.Tensor]]:
        self.asked.append(1)
        return [
            {"mean": self.scale * keys.mean((0, 2)).double(), "queries": torch.tensor(queries.shape[3])}
            for queries, keys in model.projections()
        ]


@pytest.fixture
def asked():
    """How often Learning was asked to prepare."""
    Learning.asked.clear()
    return Learning.asked


def engine(seed=0, tokens=TEXT, **settings):
    return Engine(tiny(seed, **settings), calibration=lambda: tokens)


def equal(one, other):
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, other, strict=True))


@torch.no_grad()
def test_projections_are_each_layers_rotated_queries_and_keys():
    model, states = tiny(), []
    layers, rope = [layer.self_attn for layer in model.model.layers], model.model.rotary_emb.inv_freq
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args, given: states.append(given["hidden_states"]), with_kwargs=True)
    found = Engine(model, calibration=lambda: TEXT).projections()
    for layer, hidden, (queries, keys) in zip(layers, states, found, strict=True):
        asked, offered = (
            (hidden @ part.weight.T).view(1, len(TEXT), -1, 8).transpose(1, 2) for part in (layer.q_proj, layer.k_proj)
        )
        turns = torch.arange(len(TEXT))[None, None]
        torch.testing.assert_close(queries.flatten(1, 2), rotated(asked, turns, rope), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(keys, rotated(offered, turns, rope), atol=1e-6, rtol=1e-6)
    assert found[0][0].shape == (1, 2, 2, len(TEXT), 8)


def test_calibrating_counts_as_preparing_and_not_as_tokens_of_the_run(asked):
    busy = engine()
    busy.cell(Learning())
    assert busy.counters.tokens == Counters().tokens and set(busy.counters.seconds) == {"prepare"}


def test_what_was_prepared_is_read_back_by_another_engine(asked, folder):
    first, second = (prepared(Learning(), engine()) for _ in range(2))
    assert len(asked) == 1 and equal(first, second)
    assert first[0]["mean"].dtype == torch.float64 and first[0]["queries"] == len(TEXT)
    assert len(list(folder.iterdir())) == 1


def test_a_budget_shares_what_another_has_prepared(asked):
    busy = engine()
    for budget in ("10%", "50%"):
        busy.cell(replace(Learning(), budget=type(Learning().budget).of(budget)))
    assert len(asked) == 1


@pytest.mark.parametrize("change", [{"policy": Learning(scale=2.0)}, {"seed": 1}, {"tokens": TEXT[:-1]}], ids=str)
def test_other_knobs_weights_or_text_are_prepared_for_themselves(asked, change):
    other = {"policy": Learning(), **change}
    assert not equal(prepared(Learning(), engine()), prepared(other.pop("policy"), engine(**other)))
    assert len(asked) == 2


def test_other_code_is_prepared_for_itself(asked, tmp_path, monkeypatch):
    prepared(Learning(), engine())
    (tmp_path / "edited.py").write_text("edited")
    monkeypatch.setattr(calibration.inspect, "getfile", lambda kind: str(tmp_path / "edited.py"))
    prepared(Learning(), engine())
    assert len(asked) == 2


def test_a_policy_whose_code_is_in_no_file_is_never_kept(asked, folder, monkeypatch):
    monkeypatch.setattr(Learning, "__module__", "__main__.nowhere")
    for _ in range(2):
        assert prepared(Learning(), engine())
    assert len(asked) == 2 and not folder.exists()


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[: len(whole) // 2], lambda whole: b"x" * len(whole)])
def test_a_damaged_file_is_made_anew(asked, folder, damage):
    first = prepared(Learning(), engine())
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert equal(first, prepared(Learning(), engine()))
    assert len(asked) == 2 and file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_only_time(asked, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "file"))
    assert equal(prepared(Learning(), engine()), prepared(Learning(), engine()))
    assert len(asked) == 2


def test_prepared_numbers_are_in_the_models_precision_and_counts_stay_whole(asked):
    half = engine()
    half.model.bfloat16()
    for _ in range(2):
        layers = prepared(Learning(), half)
        assert layers[0]["mean"].dtype == torch.bfloat16 and layers[0]["queries"].dtype == torch.long


def test_no_more_of_the_text_is_used_than_the_model_has_positions_for():
    assert len(text(tiny(), lambda: range(5000))) == LONGEST
    assert len(text(tiny(max_position_embeddings=64), lambda: range(5000))) == 64


def test_an_engine_without_a_text_says_so():
    with pytest.raises(UsageError, match=r"prepares on a calibration text and the engine has none: give Engine\(calibration=...\)"):
        Engine(tiny()).cell(Learning())


def test_the_projects_text_is_long_enough_for_any_tokenizer():
    assert len((room("tasks") / "calibration.txt").read_text(encoding="utf-8").split()) > LONGEST
