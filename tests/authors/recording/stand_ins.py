"""Our own stand-ins for the old library parts the authors' attention layers call; knows no method."""

from types import SimpleNamespace
from typing import Any

import torch


class Given(torch.nn.Module):
    """A projection `[heads, tokens, size]` in which the hidden state of a token is just its position."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = table.transpose(0, 1).flatten(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden[..., 0].long()]


def hidden(start: int, stop: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Hidden states `[1, stop - start, width]` for `Given`."""
    return torch.arange(start, stop, dtype=dtype)[None, :, None].repeat(1, 1, width)


def project(layer: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
    """Gives an attention layer its queries, keys and values, and takes its output before the last projection."""
    layer.q_proj, layer.k_proj, layer.v_proj = Given(queries), Given(keys), Given(values)
    layer.o_proj = layer.out_proj = torch.nn.Identity()
    return layer


def bare(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **more: object) -> Any:
    """The attributes that a borrowed forward function reads from its layer, for the given projections."""
    count, _, size = queries.shape
    layer = SimpleNamespace(config=settings(count, len(keys), size), hidden_size=count * size, head_dim=size)
    layer.num_heads, layer.num_key_value_heads, layer.num_key_value_groups = count, len(keys), count // len(keys)
    layer.layer_idx, layer.attention_dropout, layer.training, layer.rotary_emb = 0, 0.0, False, NoRotation()
    layer.__dict__.update(more)
    return project(layer, queries, keys, values)


def blocks(prompt: int, tokens: int) -> list[tuple[int, int]]:
    """Where each call starts and stops: the prompt whole, then token by token."""
    return [(0, prompt), *((token, token + 1) for token in range(prompt, tokens))]


def settings(query_heads: int, heads: int, size: int, **more: object) -> SimpleNamespace:
    """A model configuration with what the layers read."""
    return SimpleNamespace(
        hidden_size=query_heads * size,
        num_attention_heads=query_heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rope_scaling=None,
        pretraining_tp=1,
        attention_bias=False,
        attention_dropout=0.0,
        **more,
    )


def causal(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The additive causal mask `[1, 1, tokens, tokens]`."""
    return torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]


def repeat_kv(states: torch.Tensor, times: int) -> torch.Tensor:
    """Each key/value head `[batch, heads, tokens, size]` once for every query head of its group."""
    return states.repeat_interleave(times, dim=1)


class NoRotation(torch.nn.Module):
    """A rotary embedding that is never applied: the given queries and keys count as rotated."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, *_: object, **__: object) -> tuple[None, None]:
        return None, None


def unrotated(queries: torch.Tensor, keys: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for applying a rotary embedding."""
    return queries, keys


class Rotation(torch.nn.Module):
    """Rotary embedding in the old form: `(values, seq_len)` gives cosines and sines `[1, 1, seq_len, size]`."""

    def __init__(self, size: int, *_: object, base: float = 10000.0, **__: object) -> None:
        super().__init__()
        self.frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)

    def forward(self, values: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), self.frequencies).repeat(1, 2)[None, None]
        return angles.cos().to(values.dtype), angles.sin().to(values.dtype)


def rotate_half(states: torch.Tensor) -> torch.Tensor:
    """The half-split quarter turn of rotary embeddings."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


ROTATED_ALREADY = {
    "LlamaRotaryEmbedding": NoRotation,
    "apply_rotary_pos_emb": unrotated,
    "apply_rotary_pos_emb_single": lambda states, *_: states,
    "rotate_half": rotate_half,
    "repeat_kv": repeat_kv,
    "print": lambda *_: None,
}
ROTATES_ITSELF = {
    "LlamaRotaryEmbedding": Rotation,
    "rotate_half": rotate_half,
    "repeat_kv": repeat_kv,
    "print": lambda *_: None,
}
