"""InfiniGen, slowly: the skew, the channels, and which past tokens a decoded query fetches, head by head."""

import math

import numpy


def skew(queries):
    """The right singular vectors [D, D] of one head's queries [T, D], the least important first."""
    return numpy.linalg.svd(queries, full_matrices=False)[2][::-1].T


def channels(queries, keys, ratio, columns="sum"):
    """The channels in use, of one key/value head's skewed queries [G, T, D] and keys [T, D]."""
    size = keys.shape[1]
    asked = [sum(abs(x) for member in queries for x in member[:, channel]) for channel in range(size)]
    held = [sum(abs(x) for x in keys[:, channel]) for channel in range(size)]
    both = [sum(abs(q) + abs(k) for member in queries for q, k in zip(member[:, c], keys[:, c], strict=True)) for c in range(size)]
    if columns == "union":
        return best(asked, int(ratio * size)) | best(held, int(ratio * size))
    return best(both if columns == "sum" else asked, int(ratio * size))


def best(sums, count):
    """The numbers of the `count` largest sums, one at least."""
    return set(sorted(range(len(sums)), key=lambda channel: (-sums[channel], channel))[: max(1, count)])


def read(guesses, keys, matrices, used, *, scaling, alpha, allowance, window=None, softcap=None, dense_start=False):
    """Whether each head fetches each past token, [H, T].

    `guesses` [H, G, D] are queries expected, `keys` [H, T, D]; each head has a matrix [D, D] and a set of channels in use.
    """
    heads, tokens = keys.shape[:2]
    seen = [token for token in range(tokens) if window is None or token > tokens - window]
    scores = [
        {token: score(guesses[head], keys[head, token], matrices[head], used[head], scaling, softcap) for token in seen}
        for head in range(heads)
    ]
    near = [sum(one >= max(own.values()) - alpha for one in own.values()) for own in scores]
    count = min(max(1, math.floor(sum(near) / heads)), allowance)
    if dense_start and len(seen) < allowance:
        count = tokens
    mask = numpy.zeros((heads, tokens), dtype=bool)
    for head, own in enumerate(scores):
        mask[head, sorted(own, key=lambda token: (-own[token], token))[:count]] = True
    return mask


def score(guesses, key, matrix, used, scaling, softcap):
    """The highest score that a query group's guesses [G, D] give a key [D], by the channels in use after the skew."""
    skewed = key @ matrix
    scores = [sum((guess @ matrix)[channel] * skewed[channel] for channel in used) * scaling for guess in guesses]
    return max(scores) if softcap is None else softcap * math.tanh(max(scores) / softcap)
