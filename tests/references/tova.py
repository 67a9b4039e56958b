"""TOVA, slowly: all heads of a layer keep the entries that the newest token attends to most, on average over its heads."""

from . import best, walk


def kept(queries, keys, values, calls, *, keep_newest=False, **settings):
    """Walk through a layer; `calls` tell how many entries are kept after them, or None."""
    group = len(queries[0])

    def choose(count, held, weights):
        if count is None:
            return held
        rows = [row for head in weights for row in head[-group:]]
        mean = {p: sum(row.get(p, 0.0) for row in rows) / len(rows) for p in held[0]}
        if keep_newest:
            mean[max(mean)] = float("inf")
        return [best(mean, count)] * len(held)

    return walk(queries, keys, values, calls, choose, **settings)
