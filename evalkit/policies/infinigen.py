"""InfiniGen: keep everything in host memory and fetch the entries that a rehearsal of the layer says will matter."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..errors import UsageError
from ..policy import Head, Holding, LayerCache, Model, Policy, Positive, Presets, Share, additive, at_least, counts, exact, top


@dataclass(frozen=True, kw_only=True)
class InfiniGen(Policy):
    """Guess each layer's scores from the layer before, on few channels, and read the entries within `alpha` of the best guess.

    Paper: Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management", arXiv
    2406.19707. The guess is the layer's own query of the previous layer's input. An orthogonal matrix for each head, from the
    singular vectors of its queries, gathers their weight in few channels without changing scores; `ratio` of the channels take
    part. All heads read the same number of entries: the mean over heads of those within `alpha` of the head's best guess, at most
    the allowance. The first `dense_layers` read all; the token being decoded is read on top.

    Matrix and channels are learned once, on a calibration text: under protocol=stream no prompt is there to learn them on, and
    what one sequence is scored by must not hang on another. Channels are those with the largest sum of absolute queries and keys
    (the paper); the authors' accuracy code joins the best of each, and reads everything until a sequence outgrows the allowance
    (`infinigen:repo`); their faster code looks at queries alone (`infinigen:repo-faster`). `ratio` and `alpha` are those of the
    authors' scripts for Llama; theirs for OPT has alpha 4 (`infinigen:opt`). A query group is one: its queries share the matrix,
    and the highest of their guesses counts. A model's soft-cap is applied to guesses, as alpha is a distance between final scores.
    """

    alpha: float = 5.0
    ratio: Share = 0.2
    columns: Literal["sum", "union", "queries"] = "sum"
    dense_layers: Positive = 2  # the first layer has none before it to guess from
    dense_start: bool = False  # read everything until the sequence is longer than the allowance

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.19707"
    needs: ClassVar[frozenset[str]] = frozenset({"guess", "prepare"})
    host: ClassVar[bool] = True
    at_once: ClassVar[bool] = True
    presets: ClassVar[Presets] = {
        "opt": {"alpha": 4.0},
        "repo": {"columns": "union", "dense_start": True},
        "repo-faster": {"columns": "queries"},
    }

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise UsageError(f"alpha={self.alpha} is not allowed: give a distance between scores, 0 or more")

    def holding(self, head: Head, tokens: int) -> Holding[int]:
        held, channels = super().holding(head, tokens), self.channels(head.key_size)
        if self.columns == "union":  # how many the two choices have in common is known with the weights only
            channels = min(2 * channels, head.key_size)
        return replace(held, noted=0 if head.layer.index < self.dense_layers else held.entries * channels)

    def fetched(self, head: Head, tokens: int) -> int:
        if head.layer.index < self.dense_layers:
            return head.live(tokens)
        return min(head.live(tokens), self.budget.allowance(tokens, head.layer.window))

    def read(self, cache: LayerCache, query: Tensor) -> Tensor | None:
        if cache.allowance is None or cache.layer.index < self.dense_layers:
            return None
        among = cache.open()[:, :, 0]
        guessed = self.guessed(cache)
        guessed = guessed + additive(among, guessed.dtype)
        near = at_least(guessed, guessed.amax(-1, keepdim=True) - self.alpha)
        allowance = cache.allowance[:, None]
        count = (counts(near, 1, 3) // near.shape[1]).minimum(allowance)
        if self.dense_start:
            count = count.where(among[:, 0].sum(-1) >= allowance, allowance)
        return top(guessed, count[:, None])[:, :, None]

    def guessed(self, cache: LayerCache) -> Tensor:
        """[B, H, T, S] the highest score of the query group that is expected of each entry, in fp32 (fp64 for fp64 models)."""
        assert cache.guess is not None
        (batch, heads, group, count, _), partial = cache.guess.shape, exact(_partial(cache))
        query = torch.matmul(exact(cache.guess).reshape(batch, heads, group * count, -1), partial).mul_(cache.layer.scaling)
        scores = torch.matmul(query, exact(cache.marks["partial"]).transpose(2, 3))
        scores = scores.view(batch, heads, group, count, -1).amax(2)
        softcap = cache.layer.softcap
        return scores if softcap is None else torch.tanh(scores / softcap) * softcap

    def observe(self, cache: LayerCache, query: Tensor) -> LayerCache:
        """Keep the partial channels of the keys that are new, skewed."""
        if cache.layer.index < self.dense_layers:
            return cache
        old = cache.slots - cache.fresh
        partial = torch.matmul(cache.entries.newest(cache.fresh)[0], _partial(cache))
        known = cache.marks.get("partial")
        return cache.mark("partial", partial if known is None else torch.cat([known[:, :, :old], partial], dim=2))

    # Once for a model

    def prepare(self, model: Model) -> list[Mapping[str, Tensor]]:
        """Return for each layer that chooses the wanted columns of its skewing matrices, `partial` [H, D, R]."""
        return [
            {"partial": self.partial(queries[0], keys[0])} if index >= self.dense_layers else {}
            for index, (queries, keys) in enumerate(model.projections())
        ]

    def partial(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H, D, R] the columns that queries [H, G, T, D] and keys [H, T, D] are best told by; zeros where a head has fewer."""
        skew = skewing(queries)
        queries, keys = queries.to(skew) @ skew[:, None], keys.to(skew) @ skew
        wanted = self.wanted(queries, keys)
        order = wanted.byte().argsort(dim=-1, descending=True, stable=True)[:, : int(wanted.sum(-1).max())]
        return skew.gather(2, order[:, None].expand(-1, skew.shape[1], -1)) * wanted.gather(1, order)[:, None]

    def channels(self, size: int) -> int:
        """Return how many of a head's `size` channels are chosen at once."""
        return max(1, int(self.ratio * size))

    def wanted(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H, D] which channels of skewed queries [H, G, T, D] and keys [H, T, D] take part in guesses."""
        asked, held = queries.abs().sum((1, 2)), keys.abs().sum(1)
        count, every = self.channels(keys.shape[2]), torch.ones_like(held, dtype=torch.bool)
        if self.columns == "union":
            return top(asked, count, every) | top(held, count, every)
        return top(asked + queries.shape[1] * held if self.columns == "sum" else asked, count, every)


def skewing(queries: Tensor) -> Tensor:
    """[H, D, D] the right singular vectors of each head's stacked queries [H, G, T, D], ascending, in fp64.

    They are the eigenvectors of the queries' second moments, which is far less work for long texts.
    """
    stacked = queries.double().flatten(1, 2)
    return torch.linalg.eigh(stacked.transpose(1, 2) @ stacked).eigenvectors


def _partial(cache: LayerCache) -> Tensor:
    """[H, D, R] what was prepared for the layer, as its keys are."""
    return cache.prepared["partial"].to(cache.seen.device, cache.entries.dtype)
