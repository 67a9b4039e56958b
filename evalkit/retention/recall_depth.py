"""Gives the trained recall model habits that large models have by themselves; imports no policy.

Methods that keep all and read little build on them: a layer's input is much like that of the layer before and few channels tell what a
query scores (InfiniGen, arXiv 2406.19707), and few tokens matter to it (Quest, arXiv 2406.10774). Without them a small model shows what
such a method costs where it cannot work.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from evalkit.attention import AttentionInterface
from evalkit.retention.recall_attention import attend
from evalkit.retention.recall_rows import Row, masks
from evalkit.retention.recall_start import HEAD, STILL

THINNER = 232  # neurons of an MLP once there is a layer more: the model is to stay below 6 MB
FEW = 12  # channels of a head that tell what it scores: InfiniGen's fifth
NEAR, PAGE = 5.0, 16  # InfiniGen's distance between scores, and the tokens of Quest's page
SHARE = 0.3  # the most that is read of all entries or pages
LEVEL = 35.0  # by how much the best entry's score stands above the mean where the last layer looks up
SLOWEST = [*range(HEAD // 2 - FEW // 2, HEAD // 2), *range(HEAD - FEW // 2, HEAD)]  # those that turn least


def deepened(model: Any, rows: Sequence[Row]) -> Any:
    """The model with one more layer before its last, which adds nothing yet, with thinner MLPs, and a last layer that looks up on FEW
    channels; what may go is told by what is said on training rows of equal length.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += 1
    deeper = type(model)(config)
    added = config.num_hidden_layers - 2
    named = {name.replace(f"layers.{added}.", f"layers.{added + 1}."): weight for name, weight in model.state_dict().items()}
    deeper.load_state_dict(named, strict=False)
    before, last = deeper.model.layers[-2:]
    before.input_layernorm.load_state_dict(last.input_layernorm.state_dict())  # the last is guessed from this one's scaled input
    for adds in (before.self_attn.o_proj, before.mlp.down_proj):
        nn.init.zeros_(adds.weight)
    for layer, said in zip(deeper.model.layers, _given(deeper, rows, "mlp.down_proj"), strict=True):
        _thin(layer.mlp, said)
    config.intermediate_size = THINNER
    wanted = torch.tensor([row.answers for row in rows]).roll(-1, 1)  # at which tokens an answer's next is
    _narrow(deeper.model.layers[-1].self_attn, _given(deeper, rows, "self_attn.q_proj")[-1], wanted)
    return deeper


@torch.no_grad()
def _given(model: Any, rows: Sequence[Row], part: str) -> list[Tensor]:
    """[B, T, width] for each layer, what one of its parts is given on rows."""
    found: list[Tensor] = []
    parts = [layer.get_submodule(part) for layer in model.model.layers]
    hooks = [each.register_forward_pre_hook(lambda _, given: found.append(given[0])) for each in parts]
    ids, positions = (torch.tensor([getattr(row, name) for row in rows]) for name in ("ids", "positions"))
    model.model(input_ids=ids, position_ids=positions, attention_mask=masks(rows))
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def _thin(mlp: Any, said: Tensor) -> None:
    """Leave an MLP the THINNER neurons that say most, given what all of them said, [B, T, neurons]."""
    loudness = said.pow(2).mean((0, 1)) * mlp.down_proj.weight.pow(2).sum(0)
    kept = loudness.topk(THINNER).indices.sort().values
    for projection, axis in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
        projection.weight = nn.Parameter(projection.weight.index_select(axis, kept))
    mlp.gate_proj.out_features = mlp.up_proj.out_features = mlp.down_proj.in_features = mlp.intermediate_size = THINNER


@torch.no_grad()
def _narrow(attention: Any, given: Tensor, asked: Tensor) -> None:
    """Put what queries and keys score on the FEW channels that turn least: the best form of that rank for what was `given`, [B, T, width],
    of what the still channels score; those that turn are left out.
    """
    groups = len(attention.k_proj.weight) // HEAD
    for queries, keys in zip(attention.q_proj.weight.chunk(groups), attention.k_proj.weight.chunk(groups), strict=True):
        heads = queries.view(-1, HEAD, queries.shape[1])
        heads[:, ~STILL], keys[~STILL] = 0, 0
        query = (given[asked] @ queries.T).view(-1, HEAD).double()
        key = (given @ keys.T).flatten(0, 1).double()
        key -= key.mean(0)  # what all keys share changes no attention
        spread, back = zip(*(_roots(each.T @ each) for each in (query, key)), strict=True)
        left, kept, right = torch.linalg.svd(spread[0] @ spread[1])
        size = kept[:FEW, None].sqrt()
        asks, held = (side.float() for side in (size * (left.T[:FEW] @ back[0]), size * (right[:FEW] @ back[1])))
        changed, answering = torch.zeros_like(heads), torch.zeros_like(keys)
        changed[:, SLOWEST], answering[SLOWEST] = asks @ heads, held @ keys
        alike = (answering.norm() / changed.norm() * len(heads) ** 0.5).sqrt()
        heads.copy_(changed * alike)
        keys.copy_(answering / alike)


def _roots(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The root of a matrix of second moments, and its inverse where it is not nought."""
    sizes, axes = torch.linalg.eigh(moments)
    real = sizes > sizes.max() * 1e-9
    root = sizes.where(real, 0).sqrt()
    return (axes * root) @ axes.T, (axes * (1 / root).where(real, 0)) @ axes.T


class Habits:
    """Attention in which a deepened model takes on one habit at a time, `now`: none ("all"), or one of these.

    "ahead": the second and the last layer ask with what the layer before was given, the second on its FEW best channels only, of the
    singular vectors of its queries those with the most weight. "near": all layers but the first read few entries, those with the highest
    scores as guessed on FEW channels from what the layer before was given: as many for each key/value head as come within NEAR of the
    head's best on average, SHARE of all at most. "pages": the last layer reads only the SHARE of pages whose keys' bounds promise most. A
    query's own entry is always read.
    """

    def __init__(self, model: Any, text: Sequence[int]) -> None:
        """Attend so in a model from now on; `text` are tokens to tell channels by."""
        self.now, self.model, self.text = "all", model, torch.tensor([text])
        self.inputs: list[Tensor] = []  # what the layers so far make their queries of
        self.best: dict[int, Tensor] = {}  # by layer, [H, D, D] onto the best channels of each query head
        self.wanted: Tensor  # [T] at which tokens a row's heads are levelled
        self.stand: Tensor  # [H]
        self.rotary: tuple[Tensor, Tensor]  # [B, T, D] each, the cosines and sines of positions
        self.last = len(model.model.layers) - 1
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.q_proj.register_forward_pre_hook(partial(self._ask, number))
        model.model.register_forward_pre_hook(lambda *_: self.inputs.clear())
        model.model.rotary_emb.register_forward_hook(self._rotate)
        AttentionInterface.register("habits", self)
        model.set_attn_implementation("habits")

    @torch.no_grad()
    def look(self) -> None:
        """Find the best channels anew; the habit is to be set again."""
        self.now, count = "look", self.text.shape[1]
        self.model.model(input_ids=self.text, attention_mask=torch.ones(1, 1, count, count, dtype=torch.bool).tril())

    @torch.no_grad()
    def level(self, row: Row) -> None:
        """Give the last layer's heads one scale, by a training row: what is read for a group of them hangs on the highest score of all."""
        self.now, self.wanted = "level", torch.tensor(row.answers).roll(-1)
        ids, positions = (torch.tensor([part]) for part in (row.ids, row.positions))
        self.model.model(input_ids=ids, position_ids=positions, attention_mask=masks([row]))
        heads = self.model.model.layers[self.last].self_attn.q_proj.weight.view(len(self.stand), HEAD, -1)
        heads *= LEVEL / self.stand[:, None, None]

    def __call__(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        """[B, T, H, D] what queries [B, H, T, D] find in keys and values [B, G, T, D], each seen by H / G query heads."""
        number, group = layer.layer_idx, query.shape[1] // key.shape[1]
        if self.now == "look" and number > 0:
            self.best[number] = _best(query[0].reshape(key.shape[1], -1, HEAD), key[0]).repeat_interleave(group, 0)
        elif self.now == "level" and number == self.last:
            self.stand = _stand(query[0, :, self.wanted], key[0], attention_mask[0, :, self.wanted]) * scaling
        elif self.now == "ahead" and number == 1:
            query = query @ self.best[number]
        elif self.now == "near" and number > 0:
            attention_mask = attention_mask & _near(self._guess(layer) @ self.best[number], key, attention_mask, scaling)
        elif self.now == "pages" and number == self.last:
            attention_mask = attention_mask & _paged(query, key, attention_mask)
        return attend(layer, query, key, value, attention_mask, scaling)

    def _rotate(self, module: nn.Module, given: tuple[Tensor, ...], rotary: tuple[Tensor, Tensor]) -> None:
        self.rotary = rotary

    @torch.no_grad()
    def _guess(self, layer: Any) -> Tensor:
        """[B, H, T, D] a layer's queries, had it been given what the layer before was."""
        asked = functional.linear(self.inputs[-2], layer.q_proj.weight).unflatten(2, (-1, HEAD)).transpose(1, 2)
        cosines, sines = (each[:, None] for each in self.rotary)
        low, high = asked.chunk(2, -1)
        return asked * cosines + torch.cat([-high, low], -1) * sines

    def _ask(self, number: int, projection: nn.Module, given: tuple[Tensor]) -> Tensor | None:
        """What a layer's queries are made of; none is its own input."""
        self.inputs.append(given[0])
        return self.inputs[-2] if self.now == "ahead" and number in (1, self.last) else None


def _stand(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """[H] by how much the highest of the scores of queries [H, N, D] with keys [G, T, D] stands above their mean, on average."""
    scores = query @ key.repeat_interleave(len(query) // len(key), 0).transpose(1, 2)
    mean = scores.masked_fill(~mask, 0).sum(-1) / mask.sum(-1)
    return (scores.masked_fill(~mask, float("-inf")).amax(-1) - mean).mean(-1)


@torch.no_grad()
def _near(query: Tensor, key: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """[B, H, T, S] a query's own entry and those that score best with a key/value head's queries: as many as are near the best, the mean
    over heads, SHARE of all at most and one at least.
    """
    heads = query.shape[1] // key.shape[1]
    scores = (query.unflatten(1, (-1, heads)) @ key[:, :, None].transpose(3, 4)).amax(2) * scaling
    itself = torch.eye(query.shape[2], dtype=torch.bool)
    scores = scores.masked_fill(~mask | itself, float("-inf"))
    near = (scores >= scores.amax(-1, keepdim=True) - NEAR) & scores.isfinite()
    count = near.sum((1, 3), keepdim=True) // key.shape[1]
    count = count.minimum((mask.sum(-1, keepdim=True) * SHARE).long()).clamp(min=1)
    return (_highest(scores, count) | itself).repeat_interleave(heads, dim=1)


@torch.no_grad()
def _paged(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """[B, H, T, S] a query's own entry and those in the SHARE of pages that a key/value head's queries could score highest with.

    Unlike Quest's, pages are of a row, not of one of its chats, and their bounds take in what a query cannot see.
    """
    heads, count = query.shape[1] // key.shape[1], query.shape[2]
    short = -count % PAGE
    pages = functional.pad(key, (0, 0, 0, short)).unflatten(2, (-1, PAGE))
    asked = query.unflatten(1, (-1, heads))
    high, low = (bound[:, :, None].transpose(3, 4) for bound in (pages.amax(3), pages.amin(3)))
    bounds = (asked.clamp(min=0) @ high + asked.clamp(max=0) @ low).amax(2)
    seen = functional.pad(mask, (0, short)).unflatten(3, (-1, PAGE)).any(-1)
    read = _highest(bounds.masked_fill(~seen, float("-inf")), (seen.sum(-1, keepdim=True) * SHARE).long().clamp(min=1))
    entries = read.repeat_interleave(PAGE, -1)[..., :count] | torch.eye(count, dtype=torch.bool)
    return entries.repeat_interleave(heads, dim=1)


def _highest(scores: Tensor, count: Tensor) -> Tensor:
    """[B, G, T, S] which of the scores are among the `count` [B, 1, T, 1] highest."""
    least = scores.sort(-1, descending=True).values.gather(-1, (count - 1).expand(*scores.shape[:3], 1))
    return scores >= least


def _best(queries: Tensor, keys: Tensor) -> Tensor:
    """[G, D, D] the projection onto the FEW singular vectors of the queries [G, N, D] on which they and keys [G, T, D] weigh most."""
    axes = torch.linalg.eigh(queries.double().transpose(1, 2) @ queries.double()).eigenvectors.to(queries)
    heads = queries.shape[1] // keys.shape[1]
    weight = (queries @ axes).abs().sum(1) + heads * (keys @ axes).abs().sum(1)
    kept = axes.gather(2, weight.topk(FEW, -1).indices[:, None].expand(-1, HEAD, -1))
    return kept @ kept.transpose(1, 2)
