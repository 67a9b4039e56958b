"""Reads a model's arguments: which are evalkit's, which the policy's, which go on to lm-eval; knows no model and no lm-eval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from . import fetch
from .errors import UsageError, nearest
from .policies import build, resolve
from .policy import Policy, Positive

# Arguments of `from_pretrained` that lm-eval hands on, beside its own.
LOADING = frozenset({
    "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant",
    "quantization_config", "low_cpu_mem_usage", "device_map", "max_memory", "token", "variant", "use_safetensors", "torch_dtype",
    "cache_dir", "local_files_only", "force_download", "key_mapping", "tokenizer_revision",
})  # fmt: skip


# Arguments of lm-eval's hf model that cannot be honoured, with what to give instead.
REFUSED = {
    "truncation": "give overlength=truncate",
    "softmax_dtype": "log-likelihoods are made in float32 at least",
    "mixed_precision_dtype": "give dtype",
}


Offload = bool | Literal["auto"]  # whether entries live in host memory; auto: where the policy says so


class Settings(BaseModel):
    """evalkit's own model arguments."""

    model_config = ConfigDict(extra="forbid")

    protocol: Literal["prompt", "stream"] = "prompt"
    attn: Literal["sdpa", "flash", "eager"] = "sdpa"
    overlength: Literal["error", "skip", "truncate"] = "error"
    row_tokens: Positive = 1024
    prefill_chunk: Positive = 4096
    offload: Offload = "auto"


def part(name: str, given: Mapping[str, Any], passed: Iterable[str]) -> tuple[Settings, Policy, dict[str, Any]]:
    """Part the arguments `given` to the policy `name` into settings, the policy, and what lm-eval takes (`passed` names it)."""
    policy_class, _ = resolve(name)
    knobs = {field.name for field in fields(policy_class)}
    own = set(Settings.model_fields)
    loading = {*passed, *LOADING} - own
    for argument in given:
        known = own | knobs | loading
        if argument not in known:
            raise UsageError(f"unknown argument {argument!r}{nearest(argument, known)}: {_allowed(name, knobs, own)}")
        if argument in REFUSED and given[argument] not in (None, False):
            raise UsageError(f"{argument}={given[argument]} is not honoured: {REFUSED[argument]}")
    policy = build(name, **{argument: value for argument, value in given.items() if argument in knobs})
    settings = _settings({argument: value for argument, value in given.items() if argument in own and argument not in knobs})
    policy.check(settings.protocol)
    refuse_offload(policy, settings.offload)
    return settings, policy, {argument: value for argument, value in given.items() if argument not in own | knobs}


def refuse_offload(policy: Policy, offload: Offload) -> None:
    """Raise UsageError for a policy whose entries cannot live in host memory and are asked to."""
    if offload is True and policy.overrides("write"):
        raise UsageError(
            f"offload=true: {type(policy).__name__} stores entries in a form of its own, which stays on the device: "
            "give offload=auto or offload=false"
        )


def _allowed(name: str, knobs: set[str], own: set[str]) -> str:
    return f"{name} takes {', '.join(sorted(knobs))}; evalkit takes {', '.join(sorted(own))}; all else goes to lm-eval's hf model"


def _settings(given: Mapping[str, Any]) -> Settings:
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}={first['input']} is not allowed: {first['msg']}") from None


def located(pretrained: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return lm-eval's arguments that load `pretrained`: a hub name, a folder, a GGUF file, a known model, or the default."""
    if pretrained is None or pretrained in fetch.KNOWN:
        return {"pretrained": str(fetch.model_folder(pretrained or fetch.DEFAULT))}
    path = Path(pretrained).expanduser()
    if path.suffix == ".gguf" and "gguf_file" not in given:
        if not path.is_file():
            raise UsageError(f"pretrained={pretrained} does not exist: give a GGUF file, a model folder or a hub name")
        return {"pretrained": str(path.parent), "gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file() and "gguf_file" not in given:
            raise UsageError(
                f"pretrained={pretrained} is a folder without config.json: give a model folder, a GGUF file or a hub name"
            )
        return {"pretrained": str(path)}
    if pretrained.startswith(("/", ".", "~")):
        raise UsageError(f"pretrained={pretrained} does not exist: give a model folder, a GGUF file or a hub name")
    return {"pretrained": pretrained}
