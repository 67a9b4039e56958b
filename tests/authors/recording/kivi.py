"""Records KIVI: codes, scales and restored values of keys and values, and when the layer moves entries into codes."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recording.checkout import Source
from recording.stand_ins import ROTATED_ALREADY, blocks, causal, hidden, project, settings
from recording.tensors import drawn, given, heads, normal, rounded, settled

REPOSITORY = "jy-yuan/KIVI"
PACKING = "quant/new_pack.py"
PACKING_NAMES = (
    "quant_and_pack_kcache, quant_and_pack_vcache, unpack_and_dequant_kcache, unpack_and_dequant_vcache, pack_tensor, unpack_tensor"
)
CODES = [
    (900, "keys", 2, 16, "float32"),
    (901, "keys", 4, 8, "float32"),
    (902, "keys", 2, 32, "float16"),
    (903, "values", 2, 16, "float32"),
    (904, "values", 4, 8, "float32"),
    (905, "values", 2, 8, "float16"),
]
FLUSHES = [(910, 20, 2), (915, 16, 4), (920, 5, 2), (925, 32, 2)]


def fixtures(folder: Path) -> Iterator[tuple[str, Source, list[dict[str, Any]]]]:
    """The codes, and the flushing of a whole layer."""
    packing = Source(folder / "KIVI", REPOSITORY, PACKING, PACKING_NAMES)
    yield "kivi", packing, [_code_case(packing, *case) for case in CODES]
    layer = Source(folder / "KIVI", REPOSITORY, "models/llama_kivi.py", "LlamaAttention_KIVI")
    yield "kivi_flush", layer, [_flush_case(layer, packing, *case) for case in FLUSHES]


def _code_case(source: Source, seed: int, kind: str, bits: int, group: int, dtype: str) -> dict[str, Any]:
    inputs = {kind: normal(seed, [2, 32, 4] if kind == "keys" else [2, 8, 16])}
    parameters = {"bits": bits, "group_size": group, "dtype": dtype}
    run = partial(_run_code, source, inputs, parameters)
    expected = settled(run, "codes") if dtype == "float32" else run(torch.float16)
    name = f"{kind}, {bits} bits, groups of {group}, {dtype}"
    return {"name": name, "inputs": inputs, "parameters": parameters, "expected": expected}


def _run_code(source: Source, inputs: dict[str, Any], parameters: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    (kind, described), sizes = next(iter(inputs.items())), (parameters["group_size"], parameters["bits"])
    borrowed, letter = source.borrow(), kind[0]
    code, scale, least = borrowed[f"quant_and_pack_{letter}cache"](given(described, dtype)[None], *sizes)
    restored = borrowed[f"unpack_and_dequant_{letter}cache"](code, scale, least, *sizes)
    axis = 2 if kind == "keys" else 3
    codes = borrowed["unpack_tensor"](code, parameters["bits"], pack_dim=axis)
    return {
        "codes": codes[0].tolist(),
        "scales": rounded(scale[0].squeeze(axis)),
        "least": rounded(least[0].squeeze(axis)),
        "restored": rounded(restored[0]),
    }


def _flush_case(source: Source, packing: Source, seed: int, prompt: int, bits: int) -> dict[str, Any]:
    inputs = heads(seed, query_heads=2, heads=2, tokens=40, size=16)
    parameters = {"prompt": prompt, "k_bits": bits, "v_bits": bits, "group_size": 8, "residual_length": 16}
    expected = settled(partial(_run_flush, source, packing, inputs, parameters), "coded_keys", "coded_values")
    name = f"prompt {prompt}, {bits} bits, groups of 8, residual 16"
    return {"name": name, "inputs": inputs, "parameters": parameters, "expected": expected}


def _run_flush(
    source: Source, packing: Source, inputs: dict[str, Any], parameters: dict[str, int], dtype: torch.dtype
) -> dict[str, Any]:
    queries, keys, values = drawn(inputs, dtype)
    configuration = settings(2, 2, 16, use_flash=True, **parameters)
    layer = source.borrow(ROTATED_ALREADY | _kernels(packing))["LlamaAttention_KIVI"](configuration)
    project(layer, queries, keys, values)
    prompt, past = parameters["prompt"], None
    found: dict[str, list[Any]] = {"coded_keys": [], "coded_values": [], "outputs": []}
    for start, stop in blocks(prompt, 40):
        mask = causal(stop, dtype) if start == 0 else None
        output, _, past = layer(hidden(start, stop, 32, dtype), mask, None, past, use_cache=True)
        found["coded_keys"].append(stop - (0 if past[1] is None else past[1].shape[2]))
        found["coded_values"].append(stop - past[5].shape[2])
        found["outputs"].append(rounded(output[0, -1].view(2, 16), 5))
    return found


def _kernels(packing: Source) -> dict[str, Any]:
    """The two GPU kernels the layer calls, put together from the repository's own torch functions."""
    borrowed = packing.borrow()

    def quantise(states: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, ...]:
        code, scale, least = borrowed["quant_and_pack_vcache"](states, group, bits)
        return code, scale.squeeze(-1), least.squeeze(-1)

    def multiply(group: int, left: torch.Tensor, code: Any, scale: torch.Tensor, least: torch.Tensor, bits: int) -> Any:
        right = borrowed["unpack_and_dequant_vcache"](code, scale.unsqueeze(-1), least.unsqueeze(-1), group, bits)
        return left @ right.to(left.dtype)

    return {"triton_quantize_and_pack_along_last_dim": quantise, "cuda_bmm_fA_qB_outer": multiply}
