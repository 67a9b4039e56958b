"""Slow, obvious twins of the policies, token by token and head by head, and the walk through a layer that evicting ones share.

Written from the methods' descriptions; they know nothing of evalkit. Queries are [H][G][T][D], keys and values [H][T][D].
"""

import math


def walk(queries, keys, values, calls, choose, *, scaling, meet=None, window=None):
    """Take tokens in call by call; return what each head holds after each call, and every token's outputs [T][H][G].

    `calls` are pairs of a number of tokens and what `choose` is told. A token attends to what its head holds and to its own call's
    tokens up to itself, none older than `window`. After a call `choose(told, held, weights)` says what each head keeps: `held` are
    positions for each head, `weights[head]` the call's attention, {position: weight} for each query head of each token.
    `meet(query, token, key, position, after)` scores a key; `after` is how many of the keys in sight come after it.
    """
    heads, held, history, outputs, seen = range(len(keys)), [[] for _ in keys], [], [], 0
    meet = meet or (lambda query, token, key, position, after: dot(query, key))
    for count, told in calls:
        weights = [[] for _ in heads]
        for token in range(seen, seen + count):
            outputs.append([])
            for head in heads:
                sight = [p for p in [*held[head], *range(seen, token + 1)] if window is None or token - p < window]
                rows = []
                for query in queries[head]:
                    scores = [
                        meet(query[token], token, keys[head][p], p, len(sight) - 1 - i) * scaling for i, p in enumerate(sight)
                    ]
                    rows.append(dict(zip(sight, softmax(scores), strict=True)))
                weights[head] += rows
                outputs[-1].append([mix(row, values[head]) for row in rows])
        held = [[*held[head], *range(seen, seen + count)] for head in heads]
        seen += count
        if window is not None:
            held = [[p for p in own if p >= seen - window] for own in held]
        held = choose(told, held, weights)
        history.append(held)
    return history, outputs


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def softmax(scores):
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def mix(weights, values):
    """The values, each as much of it as its weight says."""
    return [sum(weight * values[p][channel] for p, weight in weights.items()) for channel in range(len(values[0]))]


def best(scores, count):
    """The positions of the `count` highest of the scores {position: score}, earlier ones first among equals; in order."""
    return sorted(sorted(scores, key=lambda p: (-scores[p], p))[:count])
