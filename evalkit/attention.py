"""The only module that knows how transformers calls attention; knows no policy and no task.

One attention function is registered with transformers; `model(ids, position_ids=..., use_cache=False, memory=row)` hands the row to
it in every layer. No mask is built and nothing is patched. Whatever a model asks of attention is honoured or refused.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface as AttentionInterface  # for those that may not know transformers
from transformers import PretrainedConfig
from transformers import PreTrainedModel as PreTrainedModel  # likewise

from .errors import UsageError
from .layer import Head, Layer
from .row import Row

NAME = "evalkit"
MODEL_TYPES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "opt", "gpt_neox", "gpt_oss"}
)  # each proved equal to transformers' own forward by tests/test_models.py
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_HARMLESS = frozenset({
    "dropout", "position_ids", "position_embeddings", "use_cache", "is_causal", "output_attentions", "output_hidden_states",
    "past_key_values", "return_dict", "layer_past", "attention_type", "output_router_logits",
})  # fmt: skip


class _Rehearsed(Exception):
    """Carries a guessed query out of a layer's projections, before attention is computed."""

    def __init__(self, query: Tensor) -> None:
        self.query = query


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    memory: Row,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: `query` [1, H x G, N, D], `key` and `value` [1, H, N, D]."""
    strange = sorted(name for name, asked in extras.items() if asked is not None and name not in _HARMLESS)
    if strange or attention_mask is not None or extras.get("dropout"):
        what = strange or (["attention_mask"] if attention_mask is not None else ["dropout"])
        raise UsageError(
            f"{type(module).__name__} asks attention for {', '.join(what)}, which evalkit does not honour: "
            f"use a model of type {', '.join(sorted(MODEL_TYPES))}"
        )
    if memory.rehearsing:
        raise _Rehearsed(query)
    heads, turning = key.shape[1], memory.ropes()
    layer = Layer(
        index=module.layer_idx,  # type: ignore[arg-type]
        depth=memory.depth,
        scaling=scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.view(heads, -1),
        window=sliding_window,
        rope=turning.get(getattr(module, "layer_type", None), turning.get(None)),
    )
    return memory.attend(layer, query, key, value), None


AttentionInterface.register(NAME, attend)


def check(config: PretrainedConfig) -> None:
    """Raise UsageError for a model whose attention evalkit does not compute exactly."""
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    odd = [name for name in ("use_bidirectional_attention", "num_kv_shared_layers") if getattr(config, name, None)]
    if config.model_type not in MODEL_TYPES or kinds or odd:
        what = f" with {', '.join([*sorted(kinds), *odd])}" if kinds or odd else ""
        raise UsageError(
            f"models of type {config.model_type!r}{what} are not supported, since their attention is not proved exact here: "
            f"use one of {', '.join(sorted(MODEL_TYPES))}"
        )


def shape(config: PretrainedConfig) -> list[tuple[Head, int]]:
    """Return what each attention layer's key/value heads are like, and how many they are. Raises UsageError as `check` does."""
    check(config)
    depth, queries = config.num_hidden_layers, config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    heads = getattr(config, "num_key_value_heads", None) or queries
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * depth  # where a model has one window for all its layers
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return [(Head(Layer(index, depth, window=own), size, size), heads) for index, own in enumerate(windows)]


def attach(model: PreTrainedModel) -> None:
    """Make the model attend through evalkit."""
    check(model.config)
    model.set_attn_implementation(NAME)
    for module in layers(model):
        if _rehearse not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_rehearse, with_kwargs=True)


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's attention layers, in order."""
    found = [module for module in model.modules() if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")]
    return sorted(found, key=lambda module: int(module.layer_idx))  # type: ignore[arg-type]


def _rehearse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Guess the layer's query by running its own projections on the previous layer's input (InfiniGen)."""
    row = kwargs.get("memory")
    if row is None or not len(row.guessing):
        return
    hidden = args[0] if args else kwargs["hidden_states"]
    row.guess = None
    if row.previous is not None:
        count, places = hidden.shape[1], row.guessing.to(hidden.device)
        previous = row.previous.to(hidden.device)
        given, named = ((previous, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": previous})
        with row.ahead(hidden.device):
            row.rehearsing = True
            try:
                module.forward(*_at(given, places, count), **{name: _at(value, places, count) for name, value in named.items()})
            except _Rehearsed as rehearsed:
                query = rehearsed.query
                row.guess = query.new_zeros(*query.shape[:2], count, query.shape[3]).index_copy_(2, places, query)
            finally:
                row.rehearsing = False
            row.foresee(module.layer_idx)
    row.give(hidden)


def _at(given: Any, places: Tensor, count: int) -> Any:
    """Of what a layer is given, [1, N, ...] for the row's N tokens, the part that is about the tokens at `places`."""
    if isinstance(given, tuple):
        return tuple(_at(part, places, count) for part in given)
    about = isinstance(given, Tensor) and given.dim() > 1 and given.shape[:2] == (1, count)
    return given.index_select(1, places) if about else given


def rotaries(model: nn.Module) -> list[nn.Module]:
    """Return the model's modules that rotate. They are looked for once: to walk all modules takes as long as some layers of a step."""
    if model not in _rotaries:
        _rotaries[model] = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    return _rotaries[model]


_rotaries: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()


def ropes(model: nn.Module) -> dict[str | None, Tensor]:
    """Return the inverse frequencies by which keys are rotated, by layer type (None where all layers agree)."""
    found: dict[str | None, Tensor] = {}
    for module in rotaries(model):
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and not name.endswith(("original_inv_freq", "long_inv_freq")):
                found[name.removesuffix("inv_freq").rstrip("_") or None] = buffer
    return found


def regime(config: PretrainedConfig, length: int) -> int:
    """Return which rotation a sequence of `length` tokens gets: sequences of unequal regimes must not share a row."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [p for p in (parameters, *parameters.values()) if isinstance(p, dict) and "rope_type" in p]
    for kind in kinds:
        original = kind.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind["rope_type"] == "longrope" and length > original:
            return 1
        if kind["rope_type"] == "dynamic" and length > original:
            return length
    return 0


def follows_length(config: PretrainedConfig) -> bool:
    """Whether the model's rotation depends on a sequence's length."""
    return regime(config, 1 << 40) != 0


@torch.inference_mode()
def run(model: PreTrainedModel, row: Row, tokens: list[int], positions: list[int], wanted: list[int]) -> Tensor:
    """Run the model over a packed row and return the logits [W, V] at the row's places `wanted`."""
    device = model.get_input_embeddings().weight.device
    for module in rotaries(model):  # a dynamic rotation must follow this row's length, not the longest one so far
        if "dynamic" in str(getattr(module, "rope_type", "")):
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)
    as_row = lambda numbers: torch.tensor([numbers], device=device)  # noqa: E731
    row.ropes, row.depth = cache(lambda: ropes(model)), model.config.num_hidden_layers
    keep = torch.tensor(wanted, dtype=torch.long)  # the output layer may be on another device
    output = model(as_row(tokens), position_ids=as_row(positions), use_cache=False, memory=row, logits_to_keep=keep)
    return output.logits[0]
