"""The recall model's later training: a layer more that adds nothing, look-ups on few channels, and the habits that steps take on."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from evalkit.retention import recall_depth
from evalkit.retention.recall_attention import attend
from evalkit.retention.recall_depth import LEVEL, NEAR, PAGE, SHARE, SLOWEST, Habits, _near, _paged, deepened
from evalkit.retention.recall_rows import Row, masks
from evalkit.retention.recall_start import HEAD, build
from tests.test_recall import loaded, rows


def test_a_deepened_model_scores_much_as_before_on_few_channels() -> None:
    maker, _ = rows()
    rng, model = random.Random(4), build(0)
    sample = [maker.copies(256, rng) for _ in range(2)]
    deeper = deepened(model, sample).eval()
    added, last = deeper.model.layers[-2:]
    assert not added.self_attn.o_proj.weight.any() and not added.mlp.down_proj.weight.any()
    assert (added.input_layernorm.weight == last.input_layernorm.weight).all()
    assert used(last) == [SLOWEST] * 2
    whole, few = scores(model, sample), scores(deeper, sample)
    likeness = (functional.normalize(whole, dim=-1) * functional.normalize(few, dim=-1)).sum(-1)
    assert likeness.mean() > 0.8


def test_asking_ahead_makes_the_last_layer_ask_what_was_known_a_layer_before() -> None:
    maker, _ = rows()
    sample = [maker.copies(128, random.Random(5)) for _ in range(2)]
    model = deepened(build(0), sample).eval()
    plain = said(model, sample)
    habits = Habits(model, sample[0].ids)
    habits.look()
    assert torch.allclose(said(model, sample), plain, atol=1e-5)
    assert sorted(habits.best) == [1, 2, 3]
    assert all(best.diagonal(dim1=1, dim2=2).sum(1).round().tolist() == [len(SLOWEST)] * 4 for best in habits.best.values())
    habits.now = "ahead"
    assert not torch.allclose(said(model, sample), plain, atol=1e-3)
    given: dict[int, torch.Tensor] = {}
    asked: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, named, number=number: given.update({number: named["hidden_states"]}), with_kwargs=True
        )
        layer.self_attn.q_proj.register_forward_hook(lambda _, args, asks, number=number: asked.update({number: asks}))
    said(model, sample)
    for number, source in ((0, 0), (1, 0), (2, 2), (3, 2)):
        assert torch.equal(asked[number], given[source] @ model.model.layers[number].self_attn.q_proj.weight.T), number


def test_a_deepened_model_can_be_saved_and_gone_on_with(tmp_path: Path) -> None:
    maker, _ = rows()
    sample = [maker.copies(128, random.Random(6))]
    model = deepened(build(0), sample).eval()
    model.save_pretrained(tmp_path)
    assert torch.allclose(said(type(model).from_pretrained(tmp_path).eval(), sample), said(model, sample), atol=1e-5)


def test_attention_in_blocks_is_attention_under_the_whole_mask() -> None:
    maker, _ = rows()
    mask = masks([maker.chats(300, random.Random(3)), maker.chats(300, random.Random(4))])
    query, key, value = (torch.randn(2, heads, 300, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    whole = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert torch.allclose(attend(None, query, key, value, mask, 0.3)[0], whole.transpose(1, 2), atol=1e-6)


def test_what_is_read_near_is_chosen_by_what_would_be_asked_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, _ = rows()
    sample = [maker.copies(128, random.Random(9))]
    model = deepened(build(0), sample).eval()
    habits, asked, chose = Habits(model, sample[0].ids), list[torch.Tensor](), list[torch.Tensor]()
    habits.look()

    def attending(layer: Any, query: torch.Tensor, *given: Any) -> Any:
        asked.append(query)
        return attend(layer, query, *given)

    def choosing(query: torch.Tensor, *given: Any) -> torch.Tensor:
        chose.append(query)
        return _near(query, *given)

    monkeypatch.setattr(recall_depth, "attend", attending)
    monkeypatch.setattr(recall_depth, "_near", choosing)
    for habits.now in ("ahead", "near"):
        said(model, sample)
    assert len(asked) == 8 and len(chose) == 3
    assert torch.allclose(chose[0], asked[1], atol=1e-5)
    assert not torch.allclose(chose[0], asked[5] @ habits.best[1], atol=1e-2)  # nor what is asked in the end


@pytest.mark.parametrize("habit", ["near", "pages"])
def test_a_habit_is_of_the_layers_it_is_said_to_be_of(habit: str) -> None:
    maker, _ = rows()
    sample = [maker.copies(256, random.Random(7))]
    model = deepened(build(0), sample).eval()
    for layer in model.model.layers:  # so that the added one shows what it finds
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, 0, 0.1, generator=torch.Generator().manual_seed(1))
    habits, found = Habits(model, sample[0].ids), dict[int, torch.Tensor]()
    habits.look()
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, number=number: found.update({number: args[0]}))
    habits.now = "all"
    said(model, sample)
    plain = dict(found)
    habits.now = habit
    said(model, sample)
    first = {"near": 1, "pages": 3}[habit]
    assert all(torch.equal(found[number], plain[number]) == (number < first) for number in range(4))


def test_levelling_gives_the_last_layers_heads_one_scale() -> None:
    maker, _ = rows()
    row = maker.copies(256, random.Random(8))
    model = deepened(build(0), [row]).eval()
    habits = Habits(model, row.ids)
    habits.level(row)
    assert (habits.stand - LEVEL).abs().max() > 1
    habits.level(row)
    assert torch.allclose(habits.stand, torch.full((4,), LEVEL), atol=1e-2)
    found = scores(model, [row])
    wanted, past = torch.tensor(row.answers).roll(-1).nonzero()[:, 0].tolist(), torch.arange(256)
    by_hand = [
        [float(own[past <= at].max() - own[past <= at].mean()) for own, at in zip(head, wanted, strict=True)] for head in found
    ]
    assert torch.allclose(torch.tensor(by_hand).mean(1) / HEAD**0.5, torch.full((4,), LEVEL), rtol=0.02)


def test_its_last_layer_looks_up_on_few_channels() -> None:
    assert used(loaded()[0].model.layers[-1]) == [SLOWEST] * 2


def used(layer: Any) -> list[list[int]]:
    """The channels of queries and of keys that are not always zero."""
    weights = [
        projection.weight.view(-1, HEAD, projection.in_features) for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    ]
    return [weight.abs().sum((0, 2)).nonzero()[:, 0].tolist() for weight in weights]


@torch.no_grad()
def said(model: Any, sample: list[Row]) -> torch.Tensor:
    ids, positions = (torch.tensor([getattr(row, name) for row in sample]) for name in ("ids", "positions"))
    hidden: torch.Tensor = model.model(input_ids=ids, position_ids=positions, attention_mask=masks(sample)).last_hidden_state
    return hidden


@torch.no_grad()
def scores(model: Any, sample: list[Row]) -> torch.Tensor:
    """[H, N, T] what the last layer's queries, where an answer is wanted, score with its keys, positions aside."""
    found: dict[str, torch.Tensor] = {}
    attention = model.model.layers[-1].self_attn
    for name in ("q_proj", "k_proj"):
        attention.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: found.update({name: out[0]}))
    said(model, sample[:1])
    query, key = (found[name].unflatten(-1, (-1, HEAD)).transpose(0, 1) for name in ("q_proj", "k_proj"))
    query = query[:, torch.tensor(sample[0].answers).roll(-1)]
    score = query @ key.repeat_interleave(len(query) // len(key), 0).transpose(1, 2)
    return score - score.mean(-1, keepdim=True)


def drawn(seed: int, entries: int = 48) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [1, 4, T, 8], keys [1, 2, T, 8], and a mask that leaves some of the past out."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, heads, entries, 8, generator=generator) * 2 for heads in (4, 2))
    mask = torch.rand(1, 1, entries, entries, generator=generator) < 0.8
    return query, key, (mask | torch.eye(entries, dtype=torch.bool)).tril()


def test_the_near_habit_reads_as_many_of_the_best_as_are_near_them() -> None:
    query, key, mask = drawn(0)
    read = _near(query, key, mask, 0.5)
    for place in range(3, 48):
        past = [entry for entry in range(place) if mask[0, 0, place, entry]]
        scores = [{entry: max(float(query[0, 2 * group + head, place] @ key[0, group, entry]) / 2 for head in (0, 1)) for entry in past}
                  for group in (0, 1)]  # fmt: skip
        near = sum(score >= max(own.values()) - NEAR for own in scores for score in own.values()) // 2
        count = max(1, min(near, int(SHARE * (len(past) + 1))))
        for head in range(4):
            best = sorted(past, key=scores[head // 2].__getitem__)[-count:]
            assert read[0, head, place, : place + 1].nonzero()[:, 0].tolist() == sorted({*best, place}), (place, head)


def test_the_pages_habit_reads_the_pages_with_the_highest_bounds() -> None:
    query, key, mask = drawn(1, 10 * PAGE - 3)
    read = _paged(query, key, mask)
    for place in range(0, 10 * PAGE - 3, 7):
        seen = sorted({entry // PAGE for entry in range(place + 1) if mask[0, 0, place, entry]})
        for group in (0, 1):
            padded = functional.pad(key[0, group], (0, 0, 0, 3)).view(10, PAGE, 8)
            bound = {
                page: max(
                    float(torch.maximum(asked * padded[page].amax(0), asked * padded[page].amin(0)).sum())
                    for asked in query[0, 2 * group : 2 * group + 2, place]
                )
                for page in seen
            }
            best = sorted(seen, key=bound.__getitem__)[-max(1, int(SHARE * len(seen))) :]
            wanted = {entry for page in best for entry in range(page * PAGE, min(10 * PAGE - 3, (page + 1) * PAGE))} | {place}
            assert read[0, 2 * group, place].nonzero()[:, 0].tolist() == sorted(wanted)
