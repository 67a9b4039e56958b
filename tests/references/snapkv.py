"""SnapKV, slowly: the last tokens of a prompt vote for the entries worth keeping, and a neighbourhood shares its votes."""

from . import best, walk


def kept(queries, keys, values, calls, *, kernel, pooling, **settings):
    """Walk through a layer; `calls` tell how many entries are kept after them and how many last tokens vote, or None."""
    group = len(queries[0])

    def choose(told, held, weights):
        if told is None:
            return held
        count, window = told
        return [one(held[head], weights[head][-group * window :], count, window) for head in range(len(held))]

    def one(held, rows, count, window):
        if len(held) <= count:
            return held
        voted = held[: len(held) - window]
        votes = [sum(row.get(p, 0.0) for row in rows) for p in voted]
        return best(dict(zip(voted, pooled(votes, kernel, pooling), strict=True)), count - window) + held[len(held) - window :]

    return walk(queries, keys, values, calls, choose, **settings)


def pooled(votes, kernel, pooling):
    """Each vote with its neighbours: their largest, or their sum over the kernel's width, what lies outside counting as 0."""
    spans = [votes[max(0, i - kernel // 2) : i + kernel // 2 + 1] for i in range(len(votes))]
    return [max(span) if pooling == "max" else sum(span) / kernel for span in spans]
