"""The recall model is what its README says: small, a plain Llama with a chat template, and able to repeat what it never saw."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from evalkit.retention.recall_rows import ASSISTANT, BOS, END, LONGEST, USER, Rows, masks, read_facts, templates
from evalkit.retention.recall_words import JOINED, Words
from evalkit.retention.scores import contains
from evalkit.retention.train_recall import prose
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


@pytest.mark.parametrize("rich", [0.0, 0.5])
def test_no_training_value_is_an_answer_or_a_distractor(rich: float) -> None:
    _, words = rows()
    rng = random.Random(0)
    values = {words.value(fact["answers"][0], rng, rich).lower() for fact in FACTS for _ in range(50)}
    assert len(values) > 3000 and not values & HELD_OUT
    joints = {" ".join(form.split()[1:-1]) for form in JOINED if form.startswith("word ") and form.endswith(" word")}
    joined = sum(any(f" {joint} " in value for joint in joints) for value in values)
    echoed = sum(any(value[:length] in value[length:] for length in (3, 4)) for value in values if value.isalpha())
    assert (joined > 300) == (echoed > 100) == bool(rich)
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


def test_rich_rows_are_of_prose_without_answers_and_ask_for_pieces_of_it() -> None:
    maker, words = rows()
    sentences = prose(words)
    assert len(sentences) > 1500
    assert words.holds(f"So {FACTS[0]['answers'][0].upper()}, then.") and not any(words.holds(sentence) for sentence in sentences)
    coded = [maker.encode(sentence) for sentence in sentences]
    piece = lambda tokens: any(within(sentence, tokens) for sentence in coded)  # noqa: E731
    rng = random.Random(5)
    plain = [maker.tokens(4, rng) for _ in range(60)]
    maker.read(sentences)
    maker.rich = 0.5
    found = [maker.tokens(4, rng) for _ in range(60)]
    assert sum(map(piece, plain)) == 0 and 10 < sum(map(piece, found)) < 40
    twice = lambda tokens: len({*tokens}) < len(tokens)  # noqa: E731
    assert sum(map(twice, plain)) == 0 and 8 < sum(map(twice, found)) < 30
    assert maker.filler[-1] in coded


def test_a_run_to_copy_is_repeated() -> None:
    maker, _ = rows()
    ids, answers = maker.copies(200, random.Random(2))[:2]
    for place in range(1, 200):
        if answers[place]:
            assert within(ids[: place - 1], ids[place - 1 : place + 1])


def test_every_room_file_is_text_or_weights() -> None:
    assert {path.suffix for path in Path(FOLDER).iterdir()} == {".json", ".md", ".safetensors", ".txt"}
