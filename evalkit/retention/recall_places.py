"""Has the first layer of the recall model look by places alone, so that what is near promises most; imports no policy.

Quest (arXiv 2406.10774) reads the pages that promise most, and a page's promise is drawn up from all of its keys. Where keys differ by what
they are of, full pages promise more than the one that is being filled, which holds what a head that looks at the last few tokens wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evalkit.retention.recall_start import GROUPS, HEAD, HEADS

LOUD = (0, 1, 2)  # the heads that tell their groups' pages
SLOW = (5, 6, 7, 8, 9)  # planes that tell dozens of tokens from hundreds, and are still within a page
NEARER = 60.0  # what each of them adds to a near token's score
ONCE = 8  # how often embeddings are moved for one hold: each time leaves little of what was amiss


class Places:
    """Keys of the first layer that all are one vector, turned by their place, and queries that score high with near ones; kept so.

    For all keys to be one vector, all tokens have to say one along some direction after the layer's norm. Embeddings are moved to do so.
    """

    @torch.no_grad()
    def __init__(self, model: Any, tokens: Sequence[int]) -> None:
        """Change and hold a model; its keys become what they are on average for `tokens`."""
        layer = model.model.layers[0]
        self.embedding, self.scale = model.model.embed_tokens.weight, layer.input_layernorm.weight
        self.query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        given = layer.input_layernorm(self.embedding)
        self.one = torch.linalg.lstsq(given.double(), torch.ones(len(given), 1, dtype=torch.float64)).solution[:, 0].float()
        self.rows: list[int] = []
        self._move(20)
        mean = layer.self_attn.k_proj(layer.input_layernorm(model.model.embed_tokens(torch.tensor(tokens)))).mean(0)
        key.copy_(mean[:, None] * self.one)
        for fixed in (key, self.scale):
            fixed.requires_grad_(False)
        for head in LOUD:
            for plane in SLOW:
                self._draw_near(head, [plane, plane + HEAD // 2], mean.view(GROUPS, HEAD)[head * GROUPS // HEADS])
        self.kept = self.query[self.rows].clone()

    def _draw_near(self, head: int, channels: list[int], key: Tensor) -> None:
        """Have a head's query point, on a plane, where keys point that have turned as far as it has."""
        rows = [head * HEAD + channel for channel in channels]
        towards = key[channels] / key[channels].norm() ** 2
        self.query[rows] = NEARER * HEAD**0.5 * towards[:, None] * self.one
        self.rows += rows

    @torch.no_grad()
    def hold(self) -> None:
        """Undo what a training step changed."""
        self._move(ONCE)
        self.query[self.rows] = self.kept

    def _move(self, times: int) -> None:
        """Move embeddings until each says one."""
        along = self.one * self.scale
        for _ in range(times):
            size = (self.embedding.pow(2).mean(-1) + 1e-6).sqrt()
            self.embedding += ((size - self.embedding @ along)[:, None]) * along / along.dot(along)
