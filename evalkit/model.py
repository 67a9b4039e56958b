"""A model's identity and its config, and the tiny random model that checks run on; knows no policy and no task."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig

SAMPLE = 4096  # elements of a tensor that enter the digest


def digest(model: nn.Module) -> str:
    """Return a digest of the model's weights: every tensor's name, shape and dtype, and a sample of its elements."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.is_meta:  # offloaded: only its name and shape are at hand
            continue
        flat = tensor.detach().flatten()
        picked = flat[:: max(1, len(flat) // SAMPLE)][: SAMPLE + 1]
        digest.update(picked.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def configured(pretrained: str, **given: Any) -> PretrainedConfig:
    """Return the config of a model folder, a file or a hub name, without its weights; whatever transformers raises, it raises."""
    return AutoConfig.from_pretrained(pretrained, **given)


def tiny(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Return a small random Llama in float64: three layers, four query heads on two key/value heads, attention far from uniform."""
    settings = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.4,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides}))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if name.endswith("norm"):  # Llama's own norms round to float32
                setattr(module, name, nn.RMSNorm(model.config.hidden_size, child.variance_epsilon))
    return model.double().eval()
