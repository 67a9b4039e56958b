"""Entries stored in host memory hold what plain ones hold, and slots are gathered from wherever those lie."""

from itertools import product

import pytest
import torch

from evalkit.entries import Plain, gather_slots
from evalkit.offload import Host, Hosted

HEADS = 2


def held(length, seed=0, rows=2):
    random = lambda seed: torch.randn(rows, HEADS, length, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)  # noqa: E731
    return random(seed), random(seed + 1)


def same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)


ORDER = torch.tensor([[[0, 3, 4], [1, 2, 6]], [[2, 5, 6], [0, 1, 3]]])
slots = lambda entries: entries.dense()[0].shape[2]  # noqa: E731
CHANGES = {
    "append": lambda entries: entries.append(*held(3, 5)),
    "take": lambda entries: entries.take(ORDER),
    "rows": lambda entries: entries.rows(torch.tensor([1, 0])),
    "slice": lambda entries: entries.rows(slice(0, 2)),
    "stack": lambda entries: entries.stack([entries, entries.take(ORDER)], [0, slots(entries) - 3]).rows(torch.tensor([2, 1])),
}


@pytest.mark.parametrize("changes", [pair for pair in product(CHANGES, repeat=2) if pair[0] != "take"] + [("take", "append")])
def test_it_holds_what_plain_entries_hold(changes):
    plain = Plain.of(*held(7))
    before, hosted = [tensor.clone() for tensor in plain.dense()], Hosted.of(plain, Host())
    wanted, found = plain, hosted
    for change in changes:
        wanted, found = CHANGES[change](wanted), CHANGES[change](found)
        same(found.dense(), wanted.dense())
        same(found.newest(2), wanted.newest(2))
        same(found.settled().chosen(ORDER[..., 1:] % 3), wanted.chosen(ORDER[..., 1:] % 3))
    assert (found.slots, found.size, found.dtype) == (slots(wanted), wanted.size, wanted.dtype)
    same(hosted.dense(), before)
    same(plain.dense(), before)


def test_a_fork_leaves_what_was_stored_alone():
    first = Hosted.of(Plain.of(*held(7)), Host())
    one, other = (first.append(*held(2, seed)).settled() for seed in (3, 4))
    same([tensor[:, :, 7:] for tensor in one.dense()], held(2, 3))
    same([tensor[:, :, 7:] for tensor in other.dense()], held(2, 4))


def test_the_newest_are_on_the_device_until_they_are_stored():
    host = Host()
    grown = Hosted.of(Plain.of(*held(7)), host).append(*held(2, 3))
    same(grown.newest(2), held(2, 3))
    assert host.fetched == 0
    stored = host.stored
    grown.settled()
    assert host.stored - stored == sum(tensor.nbytes for tensor in held(2))


@pytest.mark.parametrize("layout", [
    lambda keys: keys,
    lambda keys: keys.transpose(1, 2).contiguous().transpose(1, 2),  # as a layer's projections leave them
    lambda keys: torch.cat([keys, keys, keys], dim=3).chunk(3, dim=3)[1],  # as fused projections do
    lambda keys: torch.cat([keys, keys], dim=2)[:, :, 3:10],
    lambda keys: keys[:1].expand(2, -1, -1, -1),
    lambda keys: torch.nn.functional.pad(keys, (0, 1))[..., :4],  # not in one piece: number by number
])  # fmt: skip
def test_slots_are_gathered_from_every_layout(layout):
    keys = layout(held(7)[0])
    expected = torch.stack(
        [torch.stack([head[order] for head, order in zip(*pair, strict=True)]) for pair in zip(keys, ORDER, strict=True)]
    )
    assert torch.equal(gather_slots(keys, ORDER), expected)
