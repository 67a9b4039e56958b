"""Records TOVA: what the cache holds after the prompt and after each token."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recording.checkout import Source
from recording.stand_ins import ROTATED_ALREADY, bare, blocks, causal, hidden
from recording.tensors import drawn, heads, positions, rounded, settled

CASES = [(500, 6, 12, 4, 2), (510, 8, 5, 2, 2), (520, 1, 4, 4, 1), (530, 20, 6, 2, 2)]
ATTENTION = "src/convert_models/llama_custom.py"


def fixtures(folder: Path) -> Iterator[tuple[str, Source, list[dict[str, Any]]]]:
    """The one fixture of TOVA."""
    source = Source(folder / "TOVA", "schwartz-lab-NLP/TOVA", "src/tova_cache.py", "TOVACache")
    yield "tova", source, [_case(source, *case) for case in CASES]


def _case(source: Source, seed: int, size: int, prompt: int, query_heads: int, count: int) -> dict[str, Any]:
    inputs = heads(seed, query_heads=query_heads, heads=count, tokens=18, size=8, sharp=3.0)
    parameters = {"cache_size": size, "prompt": prompt}
    expected = settled(partial(_run, source, inputs, parameters), "kept")
    name = f"size {size}, prompt {prompt}, {query_heads} query heads on {count}"
    return {"name": name, "inputs": inputs, "parameters": parameters, "expected": expected}


class Growing:
    """The part of transformers' old dynamic cache that the method builds on."""

    def __init__(self) -> None:
        self.key_cache: list[torch.Tensor] = []
        self.value_cache: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, _: object) -> tuple[torch.Tensor, ...]:
        """Appends to the one layer; gives its keys and values."""
        if not self.key_cache:
            self.key_cache, self.value_cache = [keys], [values]
        else:
            self.key_cache[layer] = torch.cat((self.key_cache[layer], keys), dim=2)
            self.value_cache[layer] = torch.cat((self.value_cache[layer], values), dim=2)
        return self.key_cache[layer], self.value_cache[layer]


def _run(source: Source, inputs: dict[str, Any], parameters: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    queries, keys, values = drawn(inputs, dtype)
    attention = Source(source.folder, source.repository, ATTENTION, "tova_llama_attention_forward")
    forward = attention.borrow(ROTATED_ALREADY)["tova_llama_attention_forward"]
    layer = bare(queries, keys, values)
    cache = source.borrow({"DynamicCache": Growing})["TOVACache"](parameters["cache_size"])
    tokens, prompt, kept, outputs = queries.shape[1], parameters["prompt"], [], []
    for start, stop in blocks(prompt, tokens):
        states, places = hidden(start, stop, layer.hidden_size, dtype), torch.arange(start, stop)[None]
        mask = causal(stop, dtype) if start == 0 else None
        output, _, _ = forward(layer, states, mask, places, cache)
        kept.append(_same_for_all(positions(cache.key_cache[0][0], keys)))
        outputs.append(rounded(output[0, -1].view(queries.shape[0], -1), 6))
    return {"kept": kept, "outputs": outputs}


def _same_for_all(kept: list[list[int]]) -> list[int]:
    if any(row != kept[0] for row in kept):
        raise ValueError("the heads of a layer keep different tokens")
    return kept[0]
