"""Records StreamingLLM: what the cache holds after each token, keys rotated by cache index, and the outputs."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recording.checkout import Source
from recording.stand_ins import ROTATES_ITSELF, Rotation, bare, blocks, causal, hidden
from recording.tensors import drawn, heads, positions, rounded, settled

CASES = [(700, 2, 5, 1, 2, 2), (710, 4, 3, 1, 4, 2), (720, 1, 6, 10, 2, 2), (730, 4, 12, 1, 2, 2)]
ATTENTION = "streaming_llm/pos_shift/modify_llama.py"
ATTENTION_NAMES = "apply_rotary_pos_emb_single, llama_pos_shift_attention_forward"
CACHE = "streaming_llm/kv_cache.py"
CACHE_NAMES = "slice1d, slice2d, slice3d, StartRecentKVCache"


def fixtures(folder: Path) -> Iterator[tuple[str, Source, list[dict[str, Any]]]]:
    """The one fixture of StreamingLLM."""
    source = Source(folder / "streaming-llm", "mit-han-lab/streaming-llm", ATTENTION, ATTENTION_NAMES)
    yield "streaming_llm", source, [_case(source, *case) for case in CASES]


def _case(source: Source, seed: int, start: int, recent: int, prompt: int, query_heads: int, count: int) -> dict[str, Any]:
    inputs = heads(seed, query_heads=query_heads, heads=count, tokens=16, size=8, sharp=2.0)
    parameters = {"start_size": start, "recent_size": recent, "prompt": prompt}
    expected = settled(partial(_run, source, inputs, parameters), "kept")
    name = f"first {start}, last {recent}, prompt {prompt}, {query_heads} query heads on {count}"
    return {"name": name, "inputs": inputs, "parameters": parameters, "expected": expected}


def _run(source: Source, inputs: dict[str, Any], parameters: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    queries, keys, values = drawn(inputs, dtype)
    attend = source.borrow(ROTATES_ITSELF)
    layer, cache = bare(queries, keys, values, rotary_emb=Rotation(queries.shape[2])), _cache(source, parameters)
    tokens, prompt, held, kept, outputs = queries.shape[1], parameters["prompt"], 0, [], []
    past: Any = None
    for start, stop in blocks(prompt, tokens):
        states = hidden(start, stop, layer.hidden_size, dtype)
        mask, places = causal(stop, dtype) if start == 0 else None, torch.arange(held, held + stop - start)[None]
        output, _, past = attend["llama_pos_shift_attention_forward"](layer, states, mask, places, past, use_cache=True)
        past = tuple(cache([past])[0])
        held = past[0].shape[2]
        kept.append(positions(past[0][0], keys)[0])
        outputs.append(rounded(output[0, -1].view(queries.shape[0], -1), 6))
    return {"kept": kept, "outputs": outputs, "rotated_keys": rounded(_rotated(attend, past[0]), 6)}


def _cache(source: Source, parameters: dict[str, int]) -> Any:
    borrowed = Source(source.folder, source.repository, CACHE, CACHE_NAMES).borrow({"print": lambda *_: None})
    borrowed["DIM_TO_SLICE"] = {1: borrowed["slice1d"], 2: borrowed["slice2d"], 3: borrowed["slice3d"]}
    return borrowed["StartRecentKVCache"](parameters["start_size"], parameters["recent_size"])


def _rotated(attend: dict[str, Any], keys: torch.Tensor) -> torch.Tensor:
    """The keys held at the end, as the next query would meet them."""
    places = torch.arange(keys.shape[2])[None]
    turns = Rotation(keys.shape[-1])(keys, keys.shape[2])
    rotated: torch.Tensor = attend["apply_rotary_pos_emb_single"](keys, *turns, places)
    return rotated[0]
