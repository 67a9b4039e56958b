"""Says what each policy's cache takes on a model's shape, by the arithmetic that counts caches; knows no weights, runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from . import attention, fetch
from .budget import Budget
from .entries import ELEMENT_BYTES
from .errors import UsageError, nearest
from .formats import Section, Told, Word, amount
from .layer import Head
from .model import configured
from .naming import listed
from .paged import BLOCK, slack
from .policies import build
from .policy import Policy
from .settings import located

DTYPES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}  # bytes a number
KILO = 1024
Shape = Sequence[tuple[Head, int]]  # for each layer, what its key/value heads are like and how many they are


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is to be held, and where: `batch` sequences of `tokens` each, shared out over `devices`."""

    tokens: int
    batch: int = 1
    element: int = ELEMENT_BYTES  # bytes a number
    devices: int = 1
    block: int = BLOCK

    def heads(self, count: int) -> int:
        """Return how many of a layer's `count` key/value heads lie on a device. Raises UsageError where they cannot be shared out."""
        if count % self.devices and self.devices % count:
            raise UsageError(
                f"tensor-parallel={self.devices} shares out {count} key/value heads unevenly: give a divisor or a multiple of {count}"
            )
        return max(1, count // self.devices)


class Size(NamedTuple):
    """What one device holds of a layer, or of all of them."""

    entries: int
    cache: int  # bytes of keys and values in their stored form
    metadata: int  # bytes of what policies hold beside them
    fetched: int  # bytes that a layer brings from host memory at once, at most
    host: int  # bytes in host memory

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.cache + self.metadata + self.fetched


def sizes(policy: Policy, shape: Shape, load: Load) -> list[Size]:
    """Return what each layer holds on a device once the policy has acted on the prompts."""
    return [size(policy, head, load.batch * load.heads(count), load) for head, count in shape]


def size(policy: Policy, head: Head, heads: int, load: Load) -> Size:
    """Return what `heads` heads that are like `head` hold."""
    held = (Policy() if policy.lossless else policy).holding(
        head, load.tokens
    )  # under a budget of everything nothing need be noted
    stored, fetched = heads * held.stored(load.element), heads * policy.fetched(head, load.tokens) * head.size * load.element
    on_device, on_host = (0, stored) if policy.host else (stored, 0)
    return Size(heads * held.entries, on_device, heads * held.about(load.element), fetched, on_host)


def together(layers: Sequence[Size]) -> Size:
    """Return what layers take together: what one has fetched makes room for the next."""
    entries, cache, metadata, fetched, host = zip(*layers, strict=True)
    return Size(sum(entries), sum(cache), sum(metadata), max(fetched), sum(host))


# What is asked


def asked(model: str | None, load: Load, policies: str, budgets: str, *, by_layer: bool = False) -> Told:
    """Return what policies at budgets (lists with commas) hold on a model: all together and, if asked for, layer by layer.

    `model` is a folder, a config.json, a GGUF file, a hub name or a known name; None is the default one. Raises UsageError for what
    cannot be read or is not known.
    """
    name = model or fetch.DEFAULT
    found, refused = cells(listed(policies), [Budget.of(budget) for budget in listed(budgets)])
    return told(name, shape(name), load, found, refused, by_layer=by_layer)


def tokens(text: str, name: str = "context") -> int:
    """Read a number such as 4096, 32k or 1m, given as `name`. Raises UsageError for what is none."""
    match = re.fullmatch(r"(\d{1,12})|(\d{1,6}(?:\.\d+)?)([km])", text.strip().lower())
    count = (int(match[1]) if match[1] else int(float(match[2]) * KILO ** ("km".index(match[3]) + 1))) if match else 0
    if count < 1:
        raise UsageError(f"{name}={text} is not allowed: give a number of tokens such as 4096 or 32k (k is {KILO})")
    return count


def element(dtype: str) -> int:
    """Return the bytes of a number. Raises UsageError for an unknown type."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype} is not known{nearest(dtype, DTYPES)}: give one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def shape(model: str) -> Shape:
    """Return a model's shape. Raises UsageError where there is no config, and for a family of models that evalkit does not know."""
    where = place(model)
    try:
        config = configured(**where)
    except Exception as error:  # whatever transformers or the hub's client raises
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"model={model} has no config that can be read ({reason}): give a folder, a config.json or a hub name"
        ) from None
    return attention.shape(config)


def place(model: str) -> dict[str, Any]:
    """Return what finds a model's config: for a known model that is not in the cache, the hub's."""
    if model in fetch.KNOWN and fetch.cached(model) is None:
        return {"pretrained": fetch.KNOWN[model].hub}
    file = Path(model).expanduser()
    return {"pretrained": str(file)} if file.suffix == ".json" and file.is_file() else located(model, {})


def cells(names: Sequence[str], budgets: Sequence[Budget]) -> tuple[list[tuple[str, Policy]], list[str]]:
    """Return every policy at every budget (once where it takes none), and what policies say that refuse one.

    Raises UsageError for an unknown policy, and where every budget is refused.
    """
    found: list[tuple[str, Policy]] = []
    refused = []
    for name in names:
        policy = build(name)
        for budget in budgets if policy.lossless and not policy.passive else [policy.budget]:
            try:
                found.append((name, build(name, budget)))
            except UsageError as error:
                refused.append(str(error))
    if not found:
        raise UsageError(refused[0] if refused else "there is nothing to size: give policies and budgets")
    return found, refused


# What is said

HEADER = ["policy", "budget", "entries", "cache", "metadata", "fetched", "on device", "of full", "in host memory"]
ON_DEVICE = ("cache", "metadata", "fetched", "device")


def told(
    name: str, layers: Shape, load: Load, found: Sequence[tuple[str, Policy]], refused: Sequence[str], *, by_layer: bool
) -> Told:
    """Return the sizes of caches on the model called `name` in every format."""
    full = together(sizes(Policy(), layers, load)).device
    held = [(label, policy, sizes(policy, layers, load)) for label, policy in found]
    whole = [entry(label, policy, None, together(each), full) for label, policy, each in held]
    fulls = [one.device for one in sizes(Policy(), layers, load)]
    parts = [entry(label, policy, index, one, fulls[index]) for label, policy, each in held for index, one in enumerate(each)]
    parts, about = parts if by_layer else [], described(layers, load)
    table = [row(one["policy"], one) for one in whole]
    lines = [*sentences(layers, load, about), *refused]
    sections = [Section(f"The cache of {name}", 1, HEADER, table, lines), *split(parts)]
    value = {"model": name, **about, "cells": whole, "layers": parts, "refused": list(refused)}
    return Told(sections, [*whole, *parts], value)


def entry(label: str, policy: Policy, layer: int | None, held: Size, full: int) -> dict[str, Any]:
    """Return a row in figures; layer None is all of them."""
    in_bytes = {f"{what}_bytes": getattr(held, what) for what in (*ON_DEVICE, "host")}
    who = {"policy": label, "budget": str(policy.budget), "layer": layer}
    return {**who, "entries": held.entries, **in_bytes, "of_full": held.device / full}


def row(title: str, one: Mapping[str, Any]) -> list[Word]:
    """Put a row into words."""
    amounts = [amount(one[f"{what}_bytes"]) for what in ON_DEVICE]
    words = [title, one["budget"], f"{one['entries']:,}", *amounts, f"{100 * one['of_full']:.1f} %", amount(one["host_bytes"])]
    return [Word(word) for word in words]


def split(parts: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    """Yield a table of layers for each cell; layers in a row that hold the same make one line."""
    for (policy, budget), cell in groupby(parts, lambda one: (one["policy"], one["budget"])):
        table = []
        for _, alike in groupby(cell, lambda one: {**one, "layer": None}):
            first, *others = alike
            last = others[-1] if others else first
            title = f"{first['layer']} to {last['layer']}, each" if others else f"{first['layer']}"
            table.append(row(title, first))
        yield Section(f"{policy} at {budget}, layer by layer", 3, ["layer", *HEADER[1:]], table)


def token_bytes(layers: Shape, element: int = ELEMENT_BYTES) -> dict[int | None, int]:
    """Return the bytes of a token in all layers with a sliding window of so many tokens, and in those without (None)."""
    found: dict[int | None, int] = {}
    for head, count in layers:
        found[head.layer.window] = found.get(head.layer.window, 0) + count * head.size * element
    return found


def described(layers: Shape, load: Load) -> dict[str, Any]:
    """Return in figures what is to be held, and what a device loses to the full cache's blocks."""
    many = [load.batch * load.heads(count) * head.size * load.element for head, count in layers]  # bytes of a slot in all sequences
    empty = [slack(load.tokens, load.block, head.layer.window) for head, _ in layers]
    return {
        "context": load.tokens,
        "batch": load.batch,
        "element_bytes": load.element,
        "tensor_parallel": load.devices,
        "replicas": max(max(1, load.devices // count) for _, count in layers),
        "token_bytes": sum(token_bytes(layers, load.element).values()),
        "block": load.block,
        "block_waste_average_bytes": round(sum(mean * slot for (mean, _), slot in zip(empty, many, strict=True))),
        "block_waste_worst_bytes": sum(most * slot for (_, most), slot in zip(empty, many, strict=True)),
    }


def sentences(layers: Shape, load: Load, about: Mapping[str, Any]) -> Iterator[str]:
    """Yield what stands under the table."""
    windows = [head.layer.window for head, _ in layers if head.layer.window is not None]
    sliding = (
        f", {len(windows)} of them with a sliding window ({', '.join(map(str, sorted(set(windows))))} tokens)" if windows else ""
    )
    kinds = dict.fromkeys(f"{count} key/value heads of {head.key_size} + {head.value_size} numbers" for head, count in layers)
    yield f"{len(layers)} layers{sliding}, {' or '.join(kinds)}: {about['token_bytes']:,} bytes a token."
    yield f"{load.batch} x {load.tokens:,} tokens at {load.element} bytes a number; what fits a budget is chosen at {ELEMENT_BYTES}."
    if load.devices > 1:
        yield f"Figures are for each of {load.devices} devices, among which the key/value heads are shared out."
    if about["replicas"] > 1:
        yield f"There are more devices than key/value heads: each head is held {about['replicas']} times."
    average, worst = (amount(about[f"block_waste_{which}_bytes"]) for which in ("average", "worst"))
    if load.block > 1:
        yield f"In blocks of {load.block} tokens the full cache takes {average} more on average over lengths, at worst {worst}."
    yield "Metadata: scores, page bounds, partial keys, scales and least numbers."
    yield "Fetched: what a layer brings from host memory at once, at most; twice that where the next layer's is on its way meanwhile."
