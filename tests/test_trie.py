"""A tree of token sequences says each sequence once, and shares as much as is asked."""

import random

import pytest

from evalkit.trie import grow


def paths(root):
    """Every sequence's number with the tokens on the way to where it ends."""
    found = {}

    def follow(node, before):
        line = (*before, *node.tokens)
        assert node.depth == len(before)
        for end in node.ends:
            assert end not in found
            found[end] = line
        for child in node.children:
            follow(child, line)

    follow(root, ())
    return found


def drawn(seed):
    """Sequences of few different tokens, so that beginnings agree; some are equal, some are empty, some go on from others."""
    draw = random.Random(seed)
    sequences = [tuple(draw.choices("abc", k=draw.randrange(8))) for _ in range(draw.randrange(1, 12))]
    return sequences + [sequence + tuple("ab") for sequence in draw.choices(sequences, k=3)] + draw.choices(sequences, k=2)


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_is_a_path(seed, least):
    sequences = drawn(seed)
    assert paths(grow(sequences, least)) == dict(enumerate(sequences))


@pytest.mark.parametrize("seed", range(40))
def test_what_begins_alike_is_there_once(seed):
    sequences = drawn(seed)
    beginnings = {sequence[:length] for sequence in sequences for length in range(1, len(sequence) + 1)}
    assert sum(len(node.tokens) for node in grow(sequences).walk()) == len(beginnings)


@pytest.mark.parametrize("seed", range(40))
def test_beginnings_are_shared_only_where_enough_agrees(seed):
    sequences = drawn(seed)
    for node in grow(sequences, 3).walk():
        through = {sequences[end] for below in node.walk() for end in below.ends}
        assert not node.tokens or len(through) == 1 or len(node.tokens) >= 3


def test_parents_come_before_their_children():
    order = list(grow([(1, 2, 3), (1, 2, 4), (1, 5)]).walk())
    for node in order:
        assert all(order.index(child) > order.index(node) for child in node.children)


def test_through_counts_the_sequences_that_pass():
    root = grow([(1, 2), (1, 2), (1, 3), ()])
    (first,) = root.children
    assert (root.through, root.ends, first.tokens, first.through) == (4, [3], (1,), 3)
    assert sorted((node.tokens, node.ends) for node in first.children) == [((2,), [0, 1]), ((3,), [2])]
