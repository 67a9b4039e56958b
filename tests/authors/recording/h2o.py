"""Records H2O: the two lm-eval masks, the decoding mask, the cache that really drops, and its streaming form."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recording.checkout import Source
from recording.stand_ins import ROTATED_ALREADY, ROTATES_ITSELF, blocks, causal, hidden, project, settings
from recording.tensors import bits, drawn, heads, positions, rounded, settled

REPOSITORY = "FMInference/H2O"
# Seeds were chosen for runs in which heavy hitters change hands.
LM_EVAL = [
    (298, 0.1, 0.1, 24),
    (273, 0.25, 0.125, 24),
    (120, 0.0, 0.2, 24),
    (241, 0.2, 0.0, 24),
    (140, 0.05, 0.1, 24),
    (150, 0.58, 0.0, 50),
]
DECODING = [(377, 0.5, 0.25, 8), (347, 0.4, 0.2, 5), (372, 0.3, 0.3, 10), (220, 0.2, 0.0, 10), (230, 0.0, 0.3, 10)]
DROPPING = [(300, 3, 4, 12), (310, 4, 2, 5), (320, 1, 6, 12), (330, 2, 1, 1)]


def fixtures(folder: Path) -> Iterator[tuple[str, Source, list[dict[str, Any]]]]:
    """Every fixture of H2O: name, source and cases."""
    for name, file, function, record in FIXTURES:
        source = Source(folder / "H2O", REPOSITORY, f"h2o_hf/{file}", function)
        yield name, source, record(source)


def _inputs(seed: int, tokens: int, count: int = 2) -> dict[str, Any]:
    return heads(seed, query_heads=count, heads=count, tokens=tokens, size=8, sharp=4.0)


def lm_eval(source: Source) -> list[dict[str, Any]]:
    """One forward pass over prompt and answer: which keys each row sees, and what the last row reads."""
    run = _run_opt if "opt" in source.file else _run_llama
    cases = []
    for seed, heavy, recent, tokens in LM_EVAL:
        inputs, parameters = _inputs(seed, tokens), {"heavy_ratio": heavy, "recent_ratio": recent}
        expected = settled(partial(run, source, inputs, parameters), "mask")
        name = f"heavy {heavy} recent {recent} of {tokens}"
        cases.append({"name": name, "inputs": inputs, "parameters": parameters, "expected": expected})
    return cases


def _run_llama(source: Source, inputs: dict[str, Any], parameters: dict[str, float], dtype: torch.dtype) -> Any:
    queries, keys, values = drawn(inputs, dtype)
    count, tokens, size = queries.shape
    layer = source.borrow(ROTATED_ALREADY)[source.function](settings(count, count, size, **parameters))
    states = hidden(0, tokens, count * size, dtype)
    output, seen, _ = project(layer, queries, keys, values)(states, causal(tokens, dtype), output_attentions=True)
    return {"mask": bits(seen[0] > 0), "last_output": rounded(output[0, -1].view(count, size))}


def _run_opt(source: Source, inputs: dict[str, Any], parameters: dict[str, float], dtype: torch.dtype) -> Any:
    queries, keys, values = drawn(inputs, dtype)
    count, tokens, size = queries.shape
    borrowed = source.borrow()
    layer = borrowed["OPTAttention_Mask"](count * size, count, is_decoder=True, **parameters)
    states = hidden(0, tokens, count * size, dtype)
    layer = project(layer, queries, keys, values)
    output, seen, _ = layer(states, attention_mask=causal(tokens, dtype), output_attentions=True)
    _same_in_neox(source, queries, keys, int(parameters["heavy_ratio"] * tokens))
    return {"mask": bits(seen[0] > 0), "last_output": rounded(output[0, -1].view(count, size))}


def _same_in_neox(source: Source, queries: torch.Tensor, keys: torch.Tensor, heavy: int) -> None:
    """The race for heavy hitters is one function in three files: refuses to record if they differ."""
    if heavy == 0:
        return
    logits = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5 + causal(queries.shape[1], queries.dtype)[0]
    ours = source.borrow()["local_heavy_hitter_mask"](logits, heavy)
    for other in ("modify_gptneox.py", "modify_llama.py"):
        file = source.file.replace("modify_opt.py", other)
        race = Source(source.folder, source.repository, file, "local_heavy_hitter_mask").borrow()
        theirs = race["local_heavy_hitter_mask"](logits[None], heavy)[0]
        if not torch.equal(theirs.tril(), ours):
            raise ValueError(f"{file} has another race for heavy hitters")


def decoding(source: Source) -> list[dict[str, Any]]:
    """A prompt, then single tokens: what each call sees per head, and the running scores it leaves."""
    cases = []
    for seed, heavy, recent, prompt in DECODING:
        inputs, parameters = _inputs(seed, 18), {"heavy_ratio": heavy, "recent_ratio": recent, "prompt": prompt}
        expected = settled(partial(_run_decoding, source, inputs, parameters), "seen")
        name = f"heavy {heavy} recent {recent} prompt {prompt}"
        cases.append({"name": name, "inputs": inputs, "parameters": parameters, "expected": expected})
    return cases


def _run_decoding(source: Source, inputs: dict[str, Any], parameters: dict[str, Any], dtype: torch.dtype) -> Any:
    queries, keys, values = drawn(inputs, dtype)
    count, tokens, size = queries.shape
    layer = source.borrow(ROTATED_ALREADY)[source.function](settings(count, count, size, **parameters))
    project(layer, queries, keys, values)
    past, seen, scores = None, [], []
    for start, stop in blocks(parameters["prompt"], tokens):
        mask = causal(stop, dtype)[:, :, start:]
        states = hidden(start, stop, count * size, dtype)
        _, weights, past = layer(states, mask, past_key_value=past, output_attentions=True, use_cache=True)
        seen.append(bits(weights[0, :, -1] > 0))
        scores.append(rounded(layer.previous_scores))
    return {"seen": seen, "scores": scores}


def dropping(source: Source) -> list[dict[str, Any]]:
    """A prompt, then single tokens: what the cache holds per head after each call, its scores, and the last output."""
    cases = []
    for seed, heavy, recent, prompt in DROPPING:
        inputs, parameters = _inputs(seed, 20), {"hh_size": heavy, "recent_size": recent, "prompt": prompt}
        expected = settled(partial(_run_dropping, source, inputs, parameters), "kept")
        name = f"heavy {heavy} recent {recent} prompt {prompt}"
        cases.append({"name": name, "inputs": inputs, "parameters": parameters, "expected": expected})
    return cases


def _run_dropping(source: Source, inputs: dict[str, Any], parameters: dict[str, int], dtype: torch.dtype) -> Any:
    queries, keys, values = drawn(inputs, dtype)
    count, tokens, size = queries.shape
    layer = project(_dropping_layer(source, settings(count, count, size, **parameters)), queries, keys, values)
    past, kept, scores, outputs = None, [], [], []
    for start, stop in blocks(parameters["prompt"], tokens):
        states, places = hidden(start, stop, count * size, dtype), torch.arange(start, stop)[None]
        output, _, past = layer(states, position_ids=places, past_key_value=past, use_cache=True)
        kept.append(positions(past[0][0], keys))
        scores.append(rounded(layer.kv_cache.hh_score))
        outputs.append(rounded(output[0, -1].view(count, size), 6))
    return {"kept": kept, "last_scores": scores[-1], "outputs": outputs}


def _dropping_layer(source: Source, configuration: Any) -> Any:
    streaming = "streaming" in source.function
    borrowed = source.borrow(ROTATES_ITSELF if streaming else ROTATED_ALREADY)
    return borrowed["H2OLlamaAttention_streaming" if streaming else "H2OLlamaAttention"](configuration)


FIXTURES: list[tuple[str, str, str, Any]] = [
    ("h2o_lm_eval_llama", "utils_lm_eval/modify_llama.py", "LlamaAttention_heavy_hitter", lm_eval),
    ("h2o_lm_eval_opt", "utils_lm_eval/modify_opt.py", "local_heavy_hitter_mask, OPTAttention_Mask", lm_eval),
    ("h2o_decoding", "utils_hh/modify_llama.py", "LlamaAttention_heavy_hitter", decoding),
    (
        "h2o_real_drop",
        "utils_real_drop/modify_llama.py",
        "_make_causal_mask, H2OKVCache_LayerWise, H2OLlamaAttention",
        dropping,
    ),
    (
        "h2o_streaming",
        "utils_real_drop/modify_llama.py",
        "_make_causal_mask, apply_rotary_pos_emb_single, H2OKVCache_LayerWise, H2OLlamaAttention_streaming",
        dropping,
    ),
]
