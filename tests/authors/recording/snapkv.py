"""Records SnapKV: which keys the prompt compression keeps, per query head, and the pooled scores behind the choice."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recording.checkout import Source
from recording.tensors import drawn, heads, positions, rounded, settled

CASES = [
    (400, "maxpool", 7, 8, 20, 40, 2),
    (410, "avgpool", 5, 8, 20, 40, 2),
    (420, "maxpool", 5, 8, 20, 40, 4),
    (430, "avgpool", 7, 4, 12, 36, 4),
    (440, "avgpool", 1, 8, 9, 24, 2),
    (450, "avgpool", 5, 8, 20, 20, 2),
    (460, "avgpool", 5, 8, 20, 19, 2),
]


def fixtures(folder: Path) -> Iterator[tuple[str, Source, list[dict[str, Any]]]]:
    """The one fixture of SnapKV."""
    file = "snapkv/monkeypatch/snapkv_utils.py"
    source = Source(folder / "SnapKV", "FasterDecoding/SnapKV", file, "repeat_kv, SnapKVCluster")
    yield "snapkv", source, [_case(source, *case) for case in CASES]


def _case(
    source: Source, seed: int, pooling: str, kernel: int, window: int, capacity: int, tokens: int, query_heads: int
) -> dict[str, Any]:
    inputs = heads(seed, query_heads=query_heads, heads=2, tokens=tokens, size=8, sharp=2.0)
    parameters = {"pooling": pooling, "kernel_size": kernel, "window_size": window, "max_capacity_prompt": capacity}
    expected = settled(partial(_run, source, inputs, parameters), "kept")
    name = f"{pooling} {kernel}, window {window}, {capacity} of {tokens}, {query_heads} query heads on 2"
    return {"name": name, "inputs": inputs, "parameters": parameters, "expected": expected}


class Spy:
    """The module of pooling functions, remembering what a pooling gave."""

    def __init__(self) -> None:
        self.pooled: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        def pool(*arguments: Any, **options: Any) -> torch.Tensor:
            self.pooled = getattr(torch.nn.functional, name)(*arguments, **options)
            return self.pooled

        return pool


def _run(source: Source, inputs: dict[str, Any], parameters: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    queries, keys, values = (states[None] for states in drawn(inputs, dtype))
    spy = Spy()
    borrowed = source.borrow({"F": spy})
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (borrowed["repeat_kv"](states, groups) for states in (keys, values))
    kept, kept_values = borrowed["SnapKVCluster"](**parameters).update_kv(keys, queries, values, None, groups)
    order = positions(kept[0], keys[0])
    if order != positions(kept_values[0], values[0]):
        raise ValueError("keys and values were kept differently")
    return _outcome(order, spy.pooled, parameters["max_capacity_prompt"] - parameters["window_size"])


def _outcome(order: list[list[int]], pooled: torch.Tensor | None, chosen: int) -> dict[str, Any]:
    """Sorted kept positions per query head; `tied` heads are those whose last kept score is also a dropped one."""
    kept = [sorted(row) for row in order]
    if pooled is None:
        return {"kept": kept, "scores": None, "tied": [False] * len(kept)}
    ranked = torch.nn.functional.pad(pooled[0], (0, 1), value=-1.0).sort(dim=-1, descending=True).values
    tied = (ranked[:, chosen - 1] - ranked[:, chosen]).abs() < 1e-6
    return {"kept": kept, "scores": rounded(pooled[0], 6), "tied": tied.tolist()}
