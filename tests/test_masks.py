"""Masks: the highest scores are those that a stable sort puts first."""

import pytest
import torch

from evalkit.masks import LONG, highest


def by_sorting(scores, count, among):
    """The same by the obvious way."""
    found = torch.zeros_like(among)
    wanted = count if isinstance(count, torch.Tensor) else torch.tensor(count)
    rows = scores.flatten(0, -2), wanted.expand(scores.shape[:-1]).flatten(), among.flatten(0, -2), found.flatten(0, -2)
    for row, number, allowed, chosen in zip(*rows, strict=True):
        places = [place for place in range(len(row)) if allowed[place]]
        for place in sorted(places, key=lambda place: (-row[place], place))[: int(number)]:
            chosen[place] = True
    return found


@pytest.mark.parametrize("slots", [LONG // 2, LONG + 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 200, torch.tensor([[7], [200]])])
def test_long_rows_of_any_dtype_give_the_highest(count, dtype, slots):
    scores = torch.randn(2, 2, slots, generator=torch.Generator().manual_seed(slots)).to(dtype)
    among = torch.rand(scores.shape) < 0.7
    expected = by_sorting(scores, count, among)
    assert torch.equal(highest(scores, count, among), expected)
    assert torch.equal(highest(scores.masked_fill(~among, float("-inf")), count), expected)


@pytest.mark.parametrize("values", [3, 1000])  # many ties, and few
@pytest.mark.parametrize("count", [0, 1, 4, 11, 30, torch.tensor([[2], [9]]), torch.tensor([[0], [40]])])
def test_the_highest_are_those_that_a_stable_sort_puts_first(values, count):
    draw = torch.Generator().manual_seed(values)
    scores = torch.randint(values, (2, 3, 11), generator=draw).double()
    among = torch.rand(scores.shape, generator=draw) < 0.7
    scores[0, 0, :4] = float("inf")
    expected = by_sorting(scores, count, among)
    assert torch.equal(highest(scores, count, among), expected)
    assert torch.equal(highest(scores.masked_fill(~among, float("-inf")), count), expected)
