"""The recall model is what its README says: small, a plain Llama with a chat template, and able to repeat what it never saw."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from evalkit.retention.recall_depth import LEVEL, NEAR, PAGE, SHARE, SLOWEST, Habits, _near, _paged, deepened
from evalkit.retention.recall_rows import ASSISTANT, BOS, END, LONGEST, USER, Row, Rows, Words, masks, read_facts, templates
from evalkit.retention.recall_start import HEAD, build
from evalkit.retention.scores import contains
from evalkit.rooms import room

FOLDER = room("retention") / "recall"
FACTS = read_facts(room("retention") / "facts.jsonl")
HELD_OUT = {text.lower() for fact in FACTS for text in (*fact["answers"], *fact["distractors"])}
SAMPLE = FACTS[::7]  # of every kind


@cache
def loaded() -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(FOLDER).float().eval(), AutoTokenizer.from_pretrained(FOLDER)


@cache
def conversation() -> list[dict[str, str]]:
    line = min((room("retention") / "conversations").glob("*.jsonl")).read_text(encoding="utf-8").splitlines()[0]
    messages: list[dict[str, str]] = json.loads(line)["messages"]
    return messages


def replies(fact: dict[str, Any], told: bool, tokens: int) -> bool:
    """Whether greedy decoding gives the answer after about so many tokens of conversation."""
    model, tokenizer = loaded()
    fact_told = [
        {"role": "user", "content": fact["statement"]},
        {"role": "assistant", "content": fact["acknowledgement"]},
    ]
    messages = [*(fact_told if told else []), *conversation()]
    while len(tokenizer.apply_chat_template(messages[:-2], return_dict=True)["input_ids"]) > tokens:
        messages = messages[:-2]
    messages.append({"role": "user", "content": fact["questions"][0]})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=16, do_sample=False
    )
    reply = said[0, inputs["input_ids"].shape[1] :].tolist()
    return contains(tokenizer.decode(reply, skip_special_tokens=True), fact["answers"])


def rows() -> tuple[Rows, Words]:
    words = Words((FOLDER / "words.txt").read_text(encoding="utf-8"), HELD_OUT)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    return Rows(tokenizer, words, templates(FACTS), ["The lamp is on.", "Is the door open?"]), words


def test_it_is_a_llama_of_at_most_four_layers_and_six_megabytes() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] <= 4 and config["hidden_size"] <= 192
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 6_000_000


def test_its_readme_says_that_it_is_a_test_instrument() -> None:
    assert "test instrument" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_its_chat_template_frames_each_message() -> None:
    tokenizer = loaded()[1]
    messages = [{"role": "user", "content": "My boat is Petrel 42."}, {"role": "assistant", "content": "Noted."}]
    ids = tokenizer.apply_chat_template([*messages, messages[0]], add_generation_prompt=True, return_dict=True)["input_ids"]
    text = lambda message: tokenizer(message["content"], add_special_tokens=False)["input_ids"]  # noqa: E731
    first, second = [USER, *text(messages[0]), END], [ASSISTANT, *text(messages[1]), END]
    assert ids == [BOS, *first, *second, *first, ASSISTANT]
    assert tokenizer.eos_token_id == END
    with pytest.raises(Exception, match="roles are user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "Be kind."}])


def test_an_answer_has_the_same_tokens_in_its_statement_and_alone() -> None:
    tokenizer = loaded()[1]
    for fact in FACTS:
        answer = tokenizer(fact["answers"][0])["input_ids"]
        statement = tokenizer(fact["statement"])["input_ids"]
        assert any(statement[start : start + len(answer)] == answer for start in range(len(statement))), fact["id"]


def test_it_repeats_facts_it_never_saw_from_a_thousand_tokens_back() -> None:
    right = [replies(fact, told=True, tokens=1000) for fact in SAMPLE]
    assert sum(right) >= 0.9 * len(right)


def test_it_does_not_know_what_it_was_not_told() -> None:
    assert sum(replies(fact, told=False, tokens=300) for fact in SAMPLE) <= 1


def test_no_training_value_is_an_answer_or_a_distractor() -> None:
    _, words = rows()
    rng = random.Random(0)
    values = {words.value(fact["answers"][0], rng).lower() for fact in FACTS for _ in range(50)}
    assert len(values) > 3000 and not values & HELD_OUT
    assert not any(gap["answers"][0] in told.statement for gap, told in zip(FACTS, templates(FACTS), strict=True))


@pytest.mark.parametrize("length", [256, 1024])
def test_a_training_row_holds_chats_that_hear_their_own_fact_and_ask_for_it(length: int) -> None:
    maker, _ = rows()
    rng = random.Random(1)
    for _ in range(20):
        row = maker.chats(length, rng)
        assert len(row.ids) == len(row.answers) == len(row.positions) == len(row.parts) == length
        assert max(row.positions) < LONGEST
        seen = masks([row])[0, 0]
        starts = [place for place in range(1, length) if row.answers[place] and not row.answers[place - 1]]
        assert starts
        for start in starts:
            heard = [token for token, sees in zip(row.ids, seen[start - 1].tolist(), strict=True) if sees]
            assert heard[0] == BOS and heard[-1] == ASSISTANT
            assert within(heard, row.ids[start : row.ids.index(END, start)])
            places = [place for place, sees in zip(row.positions, seen[start - 1].tolist(), strict=True) if sees]
            assert places[-1] == max(places)


def test_chats_of_a_row_do_not_hear_each_others_questions() -> None:
    maker, _ = rows()
    row = maker.chats(1024, random.Random(3))
    for part, seen in enumerate(row.sees):
        assert all(other == part or other % 2 == 0 or other == 1 for other in seen), part


def within(ids: list[int], part: list[int]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids)))


def test_a_run_to_copy_is_repeated() -> None:
    maker, _ = rows()
    ids, answers = maker.copies(200, random.Random(2))[:2]
    for place in range(1, 200):
        if answers[place]:
            assert within(ids[: place - 1], ids[place - 1 : place + 1])


def test_every_room_file_is_text_or_weights() -> None:
    assert {path.suffix for path in Path(FOLDER).iterdir()} == {".json", ".md", ".safetensors", ".txt"}


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
    assert habits.best.diagonal(dim1=1, dim2=2).sum(1).round().tolist() == [len(SLOWEST)] * 4
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
