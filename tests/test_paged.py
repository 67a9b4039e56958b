"""Blocks hold what sequences hold and nothing twice that may be shared: against examples by hand and a slow allocator."""

import random

import pytest

from evalkit.errors import UsageError
from evalkit.paged import Paged, blocks, compared, paged, slack


def allocated(sequences, block):
    """What a slow allocator holds that takes in token by token: blocks, as (all tokens up to here, how many of them are the block's)."""
    held = []
    for sequence in sequences:
        own = 0
        for count in range(1, len(sequence) + 1):
            if own in (0, block):
                held.append(None)
                own = 0
            own += 1
            held[-1] = (tuple(sequence[:count]), own)
            if own == block and held[-1] in held[:-1]:
                held.pop()
                own = 0
    return held


def drawn(seed):
    """Sequences of few different tokens, so that beginnings agree; some are equal, some are empty, some go on from others."""
    draw = random.Random(seed)
    found = [tuple(draw.choices("ab", k=draw.randrange(14))) for _ in range(draw.randrange(1, 10))]
    return found + draw.choices(found, k=3) + [(*start, *"abab") for start in draw.choices(found, k=3)]


@pytest.mark.parametrize("block", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(40))
def test_shared_blocks_are_those_of_a_slow_allocator(seed, block):
    sequences = drawn(seed)
    found = paged(sequences, block)
    assert found.together == len(allocated(sequences, block))
    assert found.alone == sum(len(allocated([sequence], block)) for sequence in sequences if sequence)
    assert (found.sequences, found.tokens) == (len(sequences), sum(map(len, sequences)))


def test_the_last_block_of_a_sequence_stands_empty_in_part():
    assert paged([range(40)]) == Paged(block=16, sequences=1, tokens=40, alone=3, together=3)
    assert paged([range(40)]).waste == 8
    assert paged([range(48)]).waste == 0


def test_only_full_blocks_of_one_beginning_are_shared():
    common = list(range(40))  # two blocks and a half
    found = paged([[*common, 100, 101], [*common, 200]])
    assert (found.alone, found.together, found.saved) == (6, 4, 2)
    assert found.waste == 6 + 7


def test_equal_sequences_share_all_but_a_last_block_that_is_not_full():
    assert paged([range(32)] * 5).together == 2
    assert paged([range(33)] * 5).together == 2 + 5


def test_equal_tokens_after_other_tokens_are_another_block():
    assert paged([[1, 2, 1, 2]], 2).together == 2
    assert paged([[1, 2, 3, 4], [5, 6, 3, 4]], 2).together == 4


def test_nothing_takes_no_block():
    assert paged([]) == Paged(block=16, sequences=0, tokens=0, alone=0, together=0)
    assert paged([()]).alone == 0


@pytest.mark.parametrize("block", [0, -16])
def test_a_block_without_tokens_is_refused(block):
    with pytest.raises(UsageError, match=f"block={block} is not allowed"):
        paged([range(4)], block)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_slack_is_what_lengths_leave_empty(block):
    empty = [blocks(length, block) * block - length for length in range(160, 160 + block)]
    assert slack(160, block) == (sum(empty) / block, max(empty))


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 16, 33])
def test_slack_of_a_window_is_what_it_leaves_empty_wherever_it_lies(window, block):
    touched = [(start + window - 1) // block - start // block + 1 for start in range(block)]
    empty = [count * block - window for count in touched]
    assert slack(100, block, window) == pytest.approx((sum(empty) / block, max(empty)))
    assert slack(window, block, window) == slack(window, block)


def test_figures_are_bytes_where_a_token_has_some():
    found = paged([[*range(40), 100], [*range(40), 200]])
    assert found.as_dict(10) == {
        "block": 16, "sequences": 2, "tokens": 82, "alone": 6, "together": 4, "waste": 14,
        "stored_bytes": 820, "paged_bytes": 960, "shared_bytes": 640, "waste_bytes": 140,
    }  # fmt: skip


def test_policies_stand_beside_blocks_in_one_table():
    section = compared(paged([range(40)] * 2), 100, {"h2o@10%": 800.0})
    assert [[word.text for word in row] for row in section.rows] == [
        ["full, in one piece", "8,000", "100.0 %"],
        ["full, in blocks of 16", "9,600", "120.0 %"],
        ["full, in shared blocks of 16", "6,400", "80.0 %"],
        ["h2o@10%", "800", "10.0 %"],
    ]
    assert section.lines == ["2 prompts of 80 tokens together; the last block of each stands empty in part."]
