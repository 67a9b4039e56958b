"""The attention kernels a layer may run on: PyTorch's SDPA, flash-attn or plain matrix products; knows no policy.

Shapes: B sequences, H key/value heads, G queries per head, T new tokens, S slots, D head size. Held keys and values are never
repeated over the query group: it is folded into the query axis, or heads attend side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .cache import LayerCache
from .errors import UsageError, nearest
from .layer import Layer
from .masks import additive, summed

Kernel = Literal["sdpa", "flash", "eager"]
MANY = 32  # queries from which heads attend side by side: fewer are folded, to make larger products
LONG = 1 << 10  # held entries from which those and the new ones are attended to apart
Mask = Callable[[int, int], Tensor]  # (start, stop) of the queries -> what they may see, [B, H or 1, G or 1, T, S]


def known(name: str, device: torch.device) -> Kernel:
    """Return the kernel called `name` if it can run on `device`; UsageError otherwise."""
    if name not in get_args(Kernel):
        raise UsageError(f"attn={name} is not known{nearest(name, get_args(Kernel))}: give one of {', '.join(get_args(Kernel))}")
    if name == "flash":
        if device.type != "cuda":
            raise UsageError(f"attn=flash needs a CUDA device and the model is on {device.type}: give attn=sdpa")
        try:
            import flash_attn  # noqa: F401
        except ImportError:
            raise UsageError("attn=flash needs flash-attn: pip install 'kv-evalkit[flash]', or give attn=sdpa") from None
    return name  # type: ignore[return-value]


def whole(cache: LayerCache, query: Tensor, kernel: Kernel) -> Tensor:
    """Attend causally from the newest T queries [B, H, G, T, D] to all that each may see; returns the same shape."""
    keys, values = cache.entries.dense()
    count, layer = query.shape[3], cache.layer
    within = layer.window is None or cache.slots <= layer.window
    if count == cache.slots and within and not cache.gaps and plain(layer) and kernel != "eager":
        output = scaled_dot_product_attention(
            query.flatten(1, 2), keys, values, is_causal=True, scale=layer.scaling, enable_gqa=query.shape[2] > 1
        )
        return output.view(query.shape[:-1] + output.shape[-1:])
    held = cache.slots - count
    if held >= LONG and within and not cache.gaps and plain(layer) and kernel != "eager" and query.device.type == "cpu":
        return apart(layer, query, keys, values, held)
    mask = lambda start, stop: cache.visible(count, start, stop)  # noqa: E731
    return masked(layer, query, keys, values, mask, cache.blocks(count, query.shape[2]), kernel)


def apart(layer: Layer, query: Tensor, keys: Tensor, values: Tensor, held: int) -> Tensor:
    """Attend to the first `held` slots and to the T new ones apart, so that no mask need be made, and join both by their sums.

    The operator behind PyTorch's SDPA on CPUs, which alone returns the logarithm of each query's sum.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    group = query.shape[2]
    before, sum_before = attend(query.flatten(2, 3), keys[:, :, :held], values[:, :, :held], scale=layer.scaling)
    own = (new[:, :, None, held:].expand(-1, -1, group, -1, -1).flatten(1, 2) for new in (keys, values))
    after, sum_after = attend(query.flatten(1, 2), *own, is_causal=True, scale=layer.scaling)
    share = torch.sigmoid(sum_after.reshape(query.shape[:-1]) - sum_before.reshape(query.shape[:-1]))[..., None]
    return torch.lerp(before.reshape(query.shape), after.reshape(query.shape), share.to(query.dtype))


def drawing(cache: LayerCache, query: Tensor) -> tuple[Tensor, Tensor]:
    """Attend as `whole` does, and return also what each slot `received`, [B, H, G, S]: both by the same weights."""
    values, outputs = cache.entries.dense()[1], []

    def received() -> Iterator[Tensor]:
        for weights in cache.weighed(query):
            outputs.append(mixed(weights, values[:, :, : weights.shape[-1]]))
            yield weights.sum(3)

    total = summed(received())
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3), total


def fused(kernel: Kernel, query: Tensor) -> bool:
    """Whether outputs are to come from a fused kernel even where weights are looked at: it is far cheaper there, or rounds otherwise."""
    return kernel != "eager" and not (query.is_cpu and query.element_size() >= 4)


def plain(layer: Layer) -> bool:
    """Whether the layer's softmax is the ordinary one, which fused kernels compute."""
    return layer.softcap is None and layer.sinks is None


def masked(
    layer: Layer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Mask,
    blocks: Iterable[tuple[int, int]],
    kernel: Kernel,
) -> Tensor:
    """Attend under a mask, block of queries by block, so that memory stays linear in the prompt."""
    parts = [under(layer, query[:, :, :, start:stop], keys, values, mask(start, stop), kernel) for start, stop in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


def under(layer: Layer, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kernel: Kernel) -> Tensor:
    """Attend under a mask [B, H or 1, G or 1, T, S], all queries at once."""
    if not plain(layer) or kernel == "eager":
        return explicit(layer, query, keys, values, mask)
    return (abreast if query.shape[3] >= MANY and query.device.type == "cpu" else folded)(layer, query, keys, values, mask)


def explicit(layer: Layer, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend by plain matrix products; the only kernel that honours soft-caps and sinks."""
    return mixed(layer.attention(query, keys, mask), values)


def stepped(
    layer: Layer, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, kernel: Kernel, *, looked_at: bool
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Attend from a decoded token, [B, H, G, 1, D]; return also what gives its weights, which are made at once if they are `looked_at`."""
    if kernel == "eager" or not plain(layer) or looked_at:
        weights = layer.attention(query, keys, mask)
        return mixed(weights, values), lambda: weights
    return folded(layer, query, keys, values, mask), partial(layer.attention, query, keys, mask)


def mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Mix values [B, H, S, D] by weights [B, H, G, T, S]."""
    batch, heads, group, count, slots = weights.shape
    output = torch.matmul(weights.reshape(batch, heads, group * count, slots).to(values.dtype), values)
    return output.view(batch, heads, group, count, -1)


def folded(layer: Layer, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend by SDPA with the query group folded into the query axis. Without a mask every query sees every slot."""
    batch, heads, group, count, size = query.shape
    if mask is not None:
        mask = mask[:, :, 0] if mask.shape[2] == 1 == group else mask.expand(-1, -1, group, -1, -1).flatten(2, 3)
    output = scaled_dot_product_attention(query.reshape(batch, heads, group * count, size), keys, values, mask, scale=layer.scaling)
    return output.view(batch, heads, group, count, -1)


def abreast(layer: Layer, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend by SDPA, query heads side by side, so that the mask need not be as large as the query group.

    Nor are its numbers left to SDPA to make, which on CPUs takes it a third as long as the products.
    """
    heads, group = query.shape[1:3]
    added = additive(mask, query.dtype).expand(len(query), -1, -1, -1, -1)
    if mask.shape[1] == 1 or mask.shape[2] > 1:
        added = added.expand(-1, heads if mask.shape[2] > 1 else 1, -1, -1, -1).flatten(1, 2)
        output = scaled_dot_product_attention(query.flatten(1, 2), keys, values, added, scale=layer.scaling, enable_gqa=group > 1)
    else:
        added, keys, values = (
            part.flatten(0, 1).expand(-1, group, -1, -1) for part in (added, keys[:, :, None], values[:, :, None])
        )
        output = scaled_dot_product_attention(query.flatten(0, 1), keys, values, added, scale=layer.scaling)
    return output.view(query.shape)


def flash_packed(layer: Layer, query: Tensor, keys: Tensor, values: Tensor, lengths: list[int]) -> Tensor:
    """Attend causally inside each of the packed segments at once, by flash-attn's varlen kernel (CUDA, bf16 or fp16).

    `query` [N, H * G, D], `keys` and `values` [N, H, D], `lengths` of the segments, N in all. Returns [N, H * G, D].
    """
    from flash_attn import flash_attn_varlen_func

    ends = torch.tensor([0, *lengths], device=query.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    window = (-1, -1) if layer.window is None else (layer.window - 1, 0)
    output: Tensor = flash_attn_varlen_func(
        query, keys, values, ends, ends, max(lengths), max(lengths), softmax_scale=layer.scaling, causal=True,
        window_size=window, softcap=layer.softcap or 0.0,
    )  # fmt: skip
    return output


def rotated(keys: Tensor, turns: Tensor, rope: Tensor) -> Tensor:
    """Rotate keys [B, H, S, D] on by `turns` [B, H, S] positions, pairs (i, i + half) at inverse frequencies `rope`."""
    half = rope.shape[0]
    angles = turns[..., None].to(rope.dtype) * rope
    cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
    low, high, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
