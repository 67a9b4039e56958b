"""Records kvpress's own versions of four methods as a second opinion: scores and kept keys after a prompt."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from recording.checkout import Source
from recording.stand_ins import causal, repeat_kv, rotate_half
from recording.tensors import drawn, heads, positions, rounded, settled

PRESSES = [
    ("knorm", "KnormPress", [{"compression_ratio": 0.5}, {"compression_ratio": 0.3}]),
    (
        "snapkv",
        "SnapKVPress",
        [
            {"compression_ratio": 0.5, "window_size": 8, "kernel_size": 5},
            {"compression_ratio": 0.7, "window_size": 4, "kernel_size": 7},
        ],
    ),
    ("tova", "TOVAPress", [{"compression_ratio": 0.5}, {"compression_ratio": 0.8}]),
    ("streaming_llm", "StreamingLLMPress", [{"compression_ratio": 0.5}, {"compression_ratio": 0.75, "n_sink": 2}]),
    ("observed_attention", "ObservedAttentionPress", [{"compression_ratio": 0.5}]),
]


def fixtures(folder: Path) -> Iterator[tuple[str, Source, list[dict[str, Any]]]]:
    """One fixture for each press."""
    for number, (name, press, knobs) in enumerate(PRESSES):
        source = Source(folder / "kvpress", "NVIDIA/kvpress", f"kvpress/presses/{name}_press.py", press)
        cases = [_case(source, 1000 + 30 * number + 10 * index, knob) for index, knob in enumerate(knobs)]
        yield f"kvpress_{name}", source, cases


def _case(source: Source, seed: int, parameters: dict[str, Any]) -> dict[str, Any]:
    inputs = heads(seed, query_heads=4, heads=2, tokens=30, size=8, sharp=2.0)
    expected = settled(partial(_run, source, inputs, parameters), "kept")
    name = ", ".join(f"{knob} {value}" for knob, value in parameters.items())
    return {"name": name, "inputs": inputs, "parameters": parameters, "expected": expected}


def _run(source: Source, inputs: dict[str, Any], parameters: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    queries, keys, values = (states[None] for states in drawn(inputs, dtype))
    logits = queries @ repeat_kv(keys, 2).transpose(2, 3) / queries.shape[-1] ** 0.5
    weights = (logits + causal(keys.shape[2], dtype)).softmax(dim=-1)
    states = torch.zeros(1, keys.shape[2], 1, dtype=dtype)
    module = SimpleNamespace(head_dim=8, config=SimpleNamespace(num_attention_heads=4, num_key_value_heads=2))
    press = _press(source)(**parameters)
    scores = press.score(module, states, keys, values, weights, {})
    kept, _ = press.compress(module, states, keys, values, weights, {})
    return {"scores": rounded(scores[0]), "kept": [sorted(row) for row in positions(kept[0], keys[0])]}


def _press(source: Source) -> Any:
    """The press, on top of the repository's own base classes."""
    names: dict[str, Any] = {"repeat_kv": repeat_kv, "rotate_half": rotate_half}
    for file, base in (("base_press", "BasePress"), ("scorer_press", "ScorerPress")):
        names |= Source(source.folder, source.repository, f"kvpress/presses/{file}.py", base).borrow(names)
    return source.borrow({name: names[name] for name in ("ScorerPress", "repeat_kv", "rotate_half")})[source.function]
