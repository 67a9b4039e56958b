"""StreamingLLM, slowly: the first tokens and the newest stay, and positions are places in the cache."""

import math

from . import dot, walk


def kept(queries, keys, values, calls, *, sinks, frequencies=None, **settings):
    """Walk through a layer; `calls` tell how many entries are kept after them, or None.

    Queries and keys come rotated to their places in the text. With `frequencies` they are turned back and rotated to their places
    in the cache, where the newest token stands last.
    """

    def choose(count, held, weights):
        return held if count is None else [one(own, count) for own in held]

    def one(own, count):
        first = [p for p in own if p < min(sinks, count - 1)]
        return first + own[len(first) :][-(count - len(first)) :]

    def meet(query, token, key, position, after):
        return dot(turned(turned(query, -token, frequencies), after, frequencies), turned(key, -position, frequencies))

    return walk(queries, keys, values, calls, choose, meet=meet if frequencies is not None else None, **settings)


def turned(vector, position, frequencies):
    """Rotate each pair of channels (i, i + half) by position times its frequency."""
    half, new = len(frequencies), list(vector)
    for i, frequency in enumerate(frequencies):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        new[i] = vector[i] * cos - vector[i + half] * sin
        new[i + half] = vector[i] * sin + vector[i + half] * cos
    return new
