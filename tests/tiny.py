"""Tiny random models of every supported family, in float64 on the CPU, and tokens to feed them; knows no policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
WINDOW = 12  # of the families whose layers have one: shorter than most prompts
CROSSING = 24  # the length at which a rotation that depends on length changes

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHORT_LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.5, 2.5, 4.0, 8.0],
    "original_max_position_embeddings": CROSSING,
}
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama dynamic": {
        "model_type": "llama",
        "max_position_embeddings": CROSSING,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
    "mistral": {"sliding_window": WINDOW, "head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"sliding_window": WINDOW},
    "phi3 longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": CROSSING,
        "rope_parameters": _SHORT_LONG,
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None},
    "gpt_neox": {
        "num_key_value_heads": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
}  # fmt: skip
FAMILIES = tuple(_FAMILIES)


def model(family: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of `family` whose weights, biases, norms and sinks are all random, its attention far from uniform."""
    settings = {**_SIZES, "model_type": family, **_FAMILIES[family], **overrides}
    config = AutoConfig.for_model(**{name: value for name, value in settings.items() if value is not None})
    kernels = {"attn_implementation": "eager", "experts_implementation": "eager"}
    built: PreTrainedModel = AutoModelForCausalLM.from_config(config, **kernels).double().eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(built.named_parameters()):
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            is_scale = "norm" in name and name.endswith("weight")
            parameter.copy_((1.0 if is_scale else 0.0) + noise * (0.2 if is_scale else 0.4))
    return built


@contextmanager
def exact() -> Iterator[None]:
    """Keep float64 models from rounding to float32 inside, as their norms, softmaxes and rotations do."""
    with patch.object(torch.Tensor, "float", torch.Tensor.double), patch.object(torch, "float32", torch.float64):
        yield


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """`count` different tokens: keys of one token at two positions would tie."""
    order = torch.randperm(VOCABULARY - 3, generator=torch.Generator().manual_seed(seed))
    return tuple((order[:count] + 3).tolist())
