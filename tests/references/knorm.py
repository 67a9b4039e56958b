"""Key norms, slowly: a head keeps the entries whose keys are shortest."""

from . import best, dot, walk


def kept(queries, keys, values, calls, **settings):
    """Walk through a layer; `calls` tell how many entries are kept after them, or None."""

    def choose(count, held, weights):
        if count is None:
            return held
        return [best({p: -(dot(own[p], own[p]) ** 0.5) for p in places}, count) for own, places in zip(keys, held, strict=True)]

    return walk(queries, keys, values, calls, choose, **settings)
