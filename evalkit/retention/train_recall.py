"""Trains the recall model, a small Llama that repeats what it was told: a test instrument, not a language model; knows no policy.

python -m evalkit.retention.train_recall --out retention/recall
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from evalkit.attention import AttentionInterface
from evalkit.retention.recall_attention import attend
from evalkit.retention.recall_depth import Habits, deepened
from evalkit.retention.recall_places import Places
from evalkit.retention.recall_rows import (
    ASSISTANT,
    BOS,
    END,
    LONGEST,
    PAD,
    SPECIALS,
    USER,
    Row,
    Rows,
    masks,
    read_facts,
    templates,
    train_tokenizer,
)
from evalkit.retention.recall_start import LAYERS, build
from evalkit.retention.recall_words import Words
from evalkit.rooms import room

TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{% if message['role'] not in ('user', 'assistant') %}{{ raise_exception('roles are user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Stage(NamedTuple):
    """A part of the training: so many steps of `rows` rows of `length` tokens, a share `copies` of them runs to copy."""

    steps: int
    rows: int
    length: int
    copies: float


ENDS = re.compile(r"(?<=[.!?])\s+")  # between sentences
OTHERS = 0.02  # the weight of the loss on all other tokens


class Round(NamedTuple):
    """Stages, the steps over which the learning rate falls (the first round ends before it is low), the weight of an answer's first
    token, which has to be looked up, a factor on the learning rate, the habits that steps take on in turn once the model is
    deeper, whether its heads are levelled now and then, and how rich values are: where at all, filler is prose and the first layer
    looks by places.
    """

    stages: Sequence[Stage]
    horizon: int
    first: float
    rate: float = 1.0
    habits: Sequence[str] = ()
    level: bool = False
    rich: float = 0.0


HABITS = ("all", "near", "ahead", "pages")  # in turn, a step each
NEARER = ("all", "near", "ahead", "near", "pages")
# The first makes a model that looks up; the second, in which facts that are missed are told more often, one that knows all questions;
# the third one that also goes on as it should; the others one that has the habits of large models (recall_depth), the last two one whose
# first layer looks by places (recall_places), on prose and on values that are hard to tell from it.
ROUNDS = (
    Round((Stage(300, 6, 512, 0.1), Stage(451, 2, 1536, 0.02)), 1000, 3.0),
    Round((Stage(600, 6, 512, 0.0), Stage(120, 2, 1536, 0.0)), 720, 3.0),
    Round((Stage(200, 2, 1536, 0.02),), 200, 1.0, 0.25),
    Round((Stage(350, 6, 512, 0.0), Stage(160, 2, 1536, 0.0)), 510, 2.0, 0.6, ("all", "ahead")),
    Round((Stage(600, 6, 512, 0.0), Stage(80, 2, 1536, 0.0)), 680, 1.5, 0.6, HABITS, level=True, rich=0.5),
    Round((Stage(340, 6, 512, 0.0), Stage(40, 2, 1536, 0.0)), 380, 1.5, 0.3, NEARER, level=True, rich=0.75),
)
AFRESH = 25  # steps until the best channels are found anew, and heads levelled


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal, for weight matrices."""

    def __init__(self, weights: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for weight in group["params"]:
                past = self.state[weight].setdefault("past", torch.zeros_like(weight))
                past.lerp_(weight.grad, 1 - group["momentum"])
                step = orthogonal(weight.grad.lerp(past, group["momentum"]))
                weight.add_(step, alpha=-group["lr"] * max(1, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix with the same directions whose singular values are all near one (five steps of Newton and Schulz)."""
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / (found.norm() + 1e-7)
    for _ in range(5):
        square = found @ found.T
        found = 3.4445 * found + (-4.775 * square + 2.0315 * square @ square) @ found
    return found.T if tall else found


def losses(model: Any, rows: Sequence[Row], weight_first: float) -> tuple[Tensor, Tensor, list[bool]]:
    """The mean losses on answers and on a sample of all other tokens, and for each answer whether it begins right."""
    ids, answers, positions = (torch.tensor([getattr(row, name) for row in rows]) for name in ("ids", "answers", "positions"))
    hidden = model.model(input_ids=ids, position_ids=positions, attention_mask=masks(rows)).last_hidden_state
    hidden, wanted = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    marked = answers[:, 1:].flatten()
    others = (~marked).nonzero()[:, 0]
    asked, others = marked.nonzero()[:, 0], others[torch.randperm(len(others))[:384]]
    chosen = torch.cat([asked, others])
    logits = model.lm_head(hidden[chosen])
    each = functional.cross_entropy(logits, wanted[chosen], reduction="none")
    first = ~marked[asked - 1]
    right = (logits[: len(asked)].argmax(-1) == wanted[asked])[first].tolist()
    weight = torch.where(first, weight_first, 1.0)
    return (each[: len(asked)] * weight).sum() / weight.sum(), each[len(asked) :].mean(), right


def pace(done: float) -> float:
    """The learning rate's factor when a share of the steps is done: up at once, level, then down to almost nothing."""
    return min(1.0, (done + 0.001) / 0.02) * min(1.0, max(0.02, (1 - done) / 0.7))


def train(model: Any, rows: Rows, plan: Round, seed: int, habits: Habits | None, places: Places | None) -> None:
    """Train through a round, a line of progress now and then."""
    torch.manual_seed(seed)
    rng, lately = random.Random(seed), deque[bool](maxlen=500)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trained.items() if p.ndim == 2 and "embed" not in name]
    scales = [p for p in trained.values() if p.ndim == 1]
    optimizers = [
        Muon(matrices, 0.015),
        torch.optim.AdamW(scales, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.AdamW(model.get_input_embeddings().parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    steps = [stage for stage in plan.stages for _ in range(stage.steps)]
    begin = time.perf_counter()
    for number, stage in enumerate(steps):
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * plan.rate * pace(number / plan.horizon)
        batch = [(rows.copies if rng.random() < stage.copies else rows.chats)(stage.length, rng) for _ in range(stage.rows)]
        if habits:
            if number % AFRESH == 0:
                habits.look()
                if plan.level:
                    habits.level(rows.chats(1536, rng))
            habits.now = plan.habits[number % len(plan.habits)]
        answer, other, right = losses(model, batch, plan.first)
        (answer + OTHERS * other).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if places:
            places.hold()
        lately.extend(right)
        for fact, well in zip(chain.from_iterable(row.asked for row in batch), right, strict=True):
            rows.learn(fact, well)
        if number % 20 == 0:
            where = f"{time.perf_counter() - begin:5.0f} s  step {number} of {len(steps)}  length {stage.length}"
            print(f"{where}  loss {answer.item():.3f} {other.item():.3f}  right {sum(lately) / len(lately):.3f}", flush=True)


def calibration() -> str:
    """The text that methods learn what they need of a model on."""
    return (room("tasks") / "calibration.txt").read_text(encoding="utf-8")


def prose(words: Words) -> list[str]:
    """The sentences of the calibration text and of the tasks that are the project's own, but for those with a held-out answer."""
    texts = [calibration()]
    for path in sorted((room("tasks") / "mini").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            texts += [text for text in _strings(json.loads(line)) if text.count(" ") > 2]  # no names of activities or answers
    sentences = {sentence.strip() for text in texts for sentence in ENDS.split(text)}
    return sorted(sentence for sentence in sentences if sentence and not words.holds(sentence))


def _strings(item: Any) -> Iterator[str]:
    """All strings within a JSON value."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, (dict, list)):
        for part in item.values() if isinstance(item, dict) else item:
            yield from _strings(part)


def material(seed: int) -> Rows:
    """Tokenizer, templates, words and filler, all of them the project's own."""
    rng = random.Random(seed)
    facts = read_facts(room("retention") / "facts.jsonl")
    held_out = [text for fact in facts for text in (*fact["answers"], *fact["distractors"])]
    words = Words((room("retention") / "recall" / "words.txt").read_text(encoding="utf-8"), held_out)
    told = templates(facts)
    filler = [sentence.strip() for sentence in ENDS.split(calibration())] * 4
    filler += [words.sentence(rng) for _ in range(12_000)]
    lists = " ".join(word for body in words.lists.values() for word in body)
    spoken = [part for fact in told for part in (fact.statement.replace("{v}", ""), fact.reply, *fact.questions)]
    names = [words.name(rng) for _ in range(20_000)]
    tokenizer = train_tokenizer([*filler[:8000], *[lists] * 150, *spoken * 20, " ".join(names)])
    return Rows(tokenizer, words, told, filler)


def save(model: Any, rows: Rows, folder: Path) -> None:
    """Write the model and its tokenizer as one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    rows.tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[END],
        "pad_token": SPECIALS[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": LONGEST,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", type=Path, help="a model that was saved after some rounds, to go on from")
    parser.add_argument("--keep", type=Path, help="folder for the model after each round; nowhere unless given")
    parser.add_argument("--rounds", type=int, default=0, help="how many rounds it has had")
    chosen = parser.parse_args()
    rows = material(chosen.seed)
    model = build(chosen.seed)
    if chosen.after:
        model = type(model).from_pretrained(chosen.after)  # which may have become deeper
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    AttentionInterface.register("blocks", attend)
    model.set_attn_implementation("blocks")
    habits = places = None
    for number, plan in list(enumerate(ROUNDS))[chosen.rounds :]:
        rows.wrong = [1.0] * len(rows.facts) if number else None
        if plan.habits and not habits:
            if model.config.num_hidden_layers == LAYERS:
                torch.manual_seed(chosen.seed)
                sample = random.Random(chosen.seed)
                model = deepened(model, [rows.chats(1536, sample) for _ in range(4)])
            habits = Habits(model, rows.encode(calibration())[:1536])
        rows.rich = plan.rich
        if plan.rich and not places:
            rows.read(prose(rows.words))
            places = Places(model, [*chain.from_iterable(rows.filler), *[END, USER, ASSISTANT] * 300])
        train(model.train(), rows, plan, chosen.seed + number, habits, places)
        if chosen.keep:
            save(model.eval(), rows, chosen.keep / f"round{number + 1}")
    save(model.eval(), rows, chosen.out)


if __name__ == "__main__":
    main()
