"""The recall model before training: a small Llama whose weights already look around and look up; knows no data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evalkit.model import tiny
from evalkit.retention.recall_rows import ASSISTANT, BOS, END, LONGEST, PAD, USER, VOCABULARY

WIDTH, INNER, LAYERS, HEADS, GROUPS, HEAD = 160, 256, 3, 4, 2, 64
THETA = 1e10  # so slow that half of the planes hardly turn within the longest context
ROOM = 512  # positions past those that training shows, for a question and its answer
SPEEDS = THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))  # by how much a position turns each plane of a head, in radians
STILL = (SPEEDS * LONGEST < 1.5).repeat(2)  # the channels that hardly turn
MATCH = 2.2  # how sharply the last layer tells a match from the rest, at first


def build(seed: int) -> Any:
    """A Llama of three layers that starts near recalling: layers that look around, then one that looks up."""
    model = tiny(
        seed,
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        max_position_embeddings=LONGEST + ROOM,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        initializer_range=WIDTH**-0.5 / 1.5,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=PAD,
    ).float()
    Start(model, torch.Generator().manual_seed(seed)).set()
    return model


class Start:
    """Sets first weights that do roughly what training has to perfect; every number here is a starting point only.

    The channels of the residual are shared out: a constant, the token itself, the token before, the ones before that, and what is
    near. The constant gives heads of the first layers fixed views: some tokens back, or the last few. Heads of the last layer
    compare a token and what came before it with what came before earlier tokens, and copy the token they find.
    """

    ITSELF, BEFORE, EARLIER, NEAR = slice(1, 49), slice(49, 97), slice(97, 121), slice(121, WIDTH)
    # by layer and head: tokens back (negative) or the width of a window, and the channels that the view is written to
    VIEWS = (
        ((-1, BEFORE), (-2, EARLIER), (-3, EARLIER), (16, NEAR)),
        ((-1, BEFORE), (6, NEAR), (12, NEAR), (36, NEAR)),
    )
    STRENGTH = (0.2, 0.07)

    def __init__(self, model: Any, generator: torch.Generator) -> None:
        self.model, self.generator = model, generator

    def random(self, rows: int, columns: int) -> Tensor:
        """A random matrix that keeps lengths on average."""
        return torch.randn(rows, columns, generator=self.generator) / rows**0.5

    @torch.no_grad()
    def set(self) -> None:
        """Set the weights of the whole model."""
        embedding = self.model.model.embed_tokens.weight
        embedding.normal_(0, 0.03, generator=self.generator)
        embedding[:, self.ITSELF].normal_(0, 0.25, generator=self.generator)
        embedding[[USER, ASSISTANT], self.ITSELF] *= 0.1  # messages are not looked up by how they begin
        embedding[:, 0] = 0.5
        layers = self.model.model.layers
        for layer in layers:
            layer.mlp.down_proj.weight.mul_(0.3)
            layer.self_attn.v_proj.weight.mul_(0.1)
            for group in range(GROUPS):  # every head passes on the token itself
                start = group * HEAD
                layer.self_attn.v_proj.weight[start : start + 48, self.ITSELF] += torch.eye(48)
        for layer, views, strength in zip(layers[:-1], self.VIEWS, self.STRENGTH, strict=True):
            for head, (view, written) in enumerate(views):
                self.look_around(layer.self_attn, head, view, written, strength)
        self.look_up(layers[-1].self_attn, layers[0].self_attn.o_proj.weight)

    def look_around(self, attention: Any, head: int, view: int, written: slice, strength: float) -> None:
        """A head that sees the token some places back or the last few, and writes it to its channels."""
        back = max(0, -view)
        turns = SPEEDS > 0.05 if view < 0 else (SPEEDS < 1.2 / view) & (SPEEDS > 0.02 / view)  # noqa: SIM300
        gain = torch.where(turns, 6.0 if view < 0 else 1.2, 0.0)
        cosine, sine = slice(head * HEAD, head * HEAD + HEAD // 2), slice(head * HEAD + HEAD // 2, (head + 1) * HEAD)
        query, key, out = attention.q_proj.weight, attention.k_proj.weight, attention.o_proj.weight
        query[cosine].mul_(0.1)
        query[sine].mul_(0.1)
        query[cosine, 0] += gain * torch.cos(SPEEDS * back)
        query[sine, 0] -= gain * torch.sin(SPEEDS * back)
        if head % (HEADS // GROUPS) == 0:
            group = head * GROUPS // HEADS * HEAD
            key[group : group + HEAD].mul_(0.1)
            key[group : group + HEAD // 2, 0] += 1
        width = written.stop - written.start
        how = torch.eye(48) if width == 48 else self.random(width, 48)
        out[:, head * HEAD : (head + 1) * HEAD].mul_(0.1)
        out[written, head * HEAD : head * HEAD + 48] += how * strength * (1 if view < 0 else 2.5)

    def look_up(self, attention: Any, around: Tensor) -> None:
        """Heads whose keys are what came before a token, and whose queries are the token and what came before it."""
        dims = int(STILL.sum())
        squeeze = around[self.EARLIER, HEAD : HEAD + 48] / self.STRENGTH[0]  # how the first layer writes two tokens back
        for group in range(GROUPS):
            one, two, three = self.random(dims, 48), self.random(dims, 24), self.random(dims, WIDTH - self.NEAR.start)
            key = torch.zeros(dims, WIDTH)
            key[:, self.BEFORE], key[:, self.EARLIER], key[:, self.NEAR] = one, two, three
            self.write(attention.k_proj.weight, group, key * MATCH)
            for head in range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS):
                query = torch.zeros(dims, WIDTH)
                query[:, self.ITSELF], query[:, self.BEFORE], query[:, self.NEAR] = one, two @ squeeze, three * (head % 2 + 0.3)
                self.write(attention.q_proj.weight, head, query * MATCH)
                out = attention.o_proj.weight[:, head * HEAD : (head + 1) * HEAD]
                out.mul_(0.1)
                out[self.ITSELF, :48] += 0.3 * torch.eye(48)

    def write(self, weight: Tensor, head: int, rows: Tensor) -> None:
        """Give a head's unturned dimensions these rows; the others keep a tenth of what they had."""
        weight[head * HEAD : (head + 1) * HEAD].mul_(0.1)
        weight[head * HEAD : (head + 1) * HEAD][STILL] = rows
