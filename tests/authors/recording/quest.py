"""Records Quest: the upper bound of each page for one query, and the tokens of the chosen pages, per query head."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from recording.checkout import Source
from recording.stand_ins import ROTATED_ALREADY, bare, hidden
from recording.tensors import bits, drawn, heads, rounded

CASES = [
    (600, 4, 16, 35, 2, 2),
    (610, 4, 16, 36, 4, 2),
    (620, 4, 4, 33, 2, 2),
    (630, 16, 64, 48, 2, 2),
    (640, 5, 23, 47, 4, 1),
    (650, 16, 64, 40, 2, 2),
]


def fixtures(folder: Path) -> Iterator[tuple[str, Source, list[dict[str, Any]]]]:
    """The one fixture of Quest."""
    file, names = "evaluation/quest_attention.py", "local_heavy_hitter_mask, forward"
    source = Source(folder / "Quest", "mit-han-lab/Quest", file, names)
    yield "quest", source, [_case(source, *case) for case in CASES]


def _case(source: Source, seed: int, page: int, budget: int, tokens: int, query_heads: int, count: int) -> dict[str, Any]:
    inputs = heads(seed, query_heads=query_heads, heads=count, tokens=tokens, size=8, sharp=2.0)
    parameters = {"chunk_size": page, "token_budget": budget, "query": tokens - 1}
    expected = _run(source, inputs, parameters)
    name = f"page {page}, budget {budget} of {tokens}, {query_heads} query heads on {count}"
    return {"name": name, "inputs": inputs, "parameters": parameters, "expected": expected}


def _run(source: Source, inputs: dict[str, Any], parameters: dict[str, int]) -> dict[str, Any]:
    queries, keys, values = drawn(inputs, torch.float32)
    borrowed = source.borrow({**ROTATED_ALREADY, "DynamicCache": type("NoCache", (), {})})
    choose = mock.Mock(side_effect=borrowed["local_heavy_hitter_mask"])
    borrowed["local_heavy_hitter_mask"] = choose
    last = parameters["query"]
    layer = bare(queries, keys, values, layer_id=2, **parameters)
    state = hidden(last, last + 1, layer.hidden_size)
    past = (keys[None, :, :last], values[None, :, :last])
    output, weights, _ = borrowed["forward"](layer, state, None, torch.tensor([[last]]), past, True)
    pages, read = choose.call_args.args[0][0, :, 0, :: parameters["chunk_size"]], weights[0, :, 0] > 0
    _refuse_close(pages, read[:, :: parameters["chunk_size"]])
    return {
        "bounds": rounded(pages),
        "read": bits(read),
        "output": rounded(output[0, 0].view(queries.shape[0], -1)),
    }


def _refuse_close(bounds: torch.Tensor, chosen: torch.Tensor) -> None:
    """The file computes in float32 alone, so the gap between chosen and other pages is looked at instead."""
    gap = bounds.masked_fill(~chosen, torch.inf).amin(dim=-1) - bounds.masked_fill(chosen, -torch.inf).amax(dim=-1)
    if bool((gap < 1e-4).any()):
        raise ValueError("pages lie too close: choose another seed")
