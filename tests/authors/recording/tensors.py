"""Seeded inputs and the forms in which tensors go into a fixture; knows no method."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch


def normal(seed: int, shape: list[int], scale: float = 1.0) -> dict[str, Any]:
    """Describes an input: standard normal float32 from `numpy.random.RandomState(seed)`, times `scale`."""
    values = _draw(seed, shape, scale)
    return {"seed": seed, "shape": shape, "scale": scale, "sha256": hashlib.sha256(values.tobytes()).hexdigest()}


def given(described: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor a description stands for; a ValueError when this machine draws other bytes than the recorder did."""
    values = _draw(described["seed"], described["shape"], described["scale"])
    if hashlib.sha256(values.tobytes()).hexdigest() != described["sha256"]:
        raise ValueError(f"this numpy draws other numbers from seed {described['seed']} than the recorder did")
    return torch.from_numpy(values).to(dtype)


def drawn(inputs: Mapping[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """The queries, keys and values of a case, each `[heads, tokens, size]`."""
    return [given(inputs[name], dtype) for name in ("queries", "keys", "values")]


def _draw(seed: int, shape: list[int], scale: float) -> numpy.ndarray:
    values = numpy.random.RandomState(seed).standard_normal(shape).astype(numpy.float32)
    return values * numpy.float32(scale)


def heads(seed: int, *, query_heads: int, heads: int, tokens: int, size: int, sharp: float = 1.0) -> dict[str, Any]:
    """Descriptions of queries, keys and values `[heads, tokens, size]`; `sharp` scales the queries."""
    return {
        "queries": normal(seed, [query_heads, tokens, size], sharp),
        "keys": normal(seed + 1, [heads, tokens, size]),
        "values": normal(seed + 2, [heads, tokens, size]),
    }


def bits(mask: torch.Tensor) -> Any:
    """A mask as nested lists whose last axis is one text of 0 and 1: row i of head h is `bits[h][i]`."""
    if mask.dim() == 1:
        return "".join("1" if entry else "0" for entry in mask.tolist())
    return [bits(row) for row in mask]


def rounded(values: torch.Tensor, digits: int = 7) -> Any:
    """Nested lists of numbers with `digits` significant digits."""
    if values.dim() == 0:
        return float(f"{values.item():.{digits}g}")
    return [rounded(row, digits) for row in values]


def positions(rows: torch.Tensor, among: torch.Tensor) -> list[list[int]]:
    """Which row of `among` `[heads, tokens, size]` each row of `rows` `[heads, kept, size]` is, in their order."""
    same = (rows.unsqueeze(2) == among.unsqueeze(1)).all(dim=-1)
    if not bool((same.sum(dim=-1) == 1).all()):
        raise ValueError("a row is not one of the rows it was taken from")
    found: list[list[int]] = same.int().argmax(dim=-1).tolist()
    return found


def settled(run: Callable[[torch.dtype], dict[str, Any]], *discrete: str) -> dict[str, Any]:
    """What `run` gives in float32, refused when its `discrete` entries differ in float64: the scores lie too close."""
    outcome = run(torch.float32)
    torch.set_default_dtype(torch.float64)
    exact = run(torch.float64)
    torch.set_default_dtype(torch.float32)
    for name in discrete:
        if outcome[name] != exact[name]:
            raise ValueError(f"float32 and float64 disagree on {name}: choose another seed")
    return outcome
