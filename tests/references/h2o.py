"""H2O, slowly: entries collect the attention they draw; the newest stay, and of the others those that drew most."""

from . import best, walk


def kept(queries, keys, values, calls, **settings):
    """Walk through a layer; `calls` tell how many recent tokens and how many heavy hitters a head keeps after them, or None."""
    drawn = [{} for _ in keys]  # position -> attention so far, for each head

    def choose(told, held, weights):
        for head, rows in enumerate(weights):
            for row in rows:
                for p, weight in row.items():
                    drawn[head][p] = drawn[head].get(p, 0.0) + weight
        return held if told is None else [part(*pair, *told) for pair in zip(drawn, held, strict=True)]

    return walk(queries, keys, values, calls, choose, **settings)


def part(drawn, held, recent, heavy):
    """Part a head's positions, in order, into recent ones and others; keep the recent and the heaviest others."""
    cut = max(0, len(held) - recent)
    return best({p: drawn[p] for p in held[:cut]}, heavy) + held[cut:]


def halves(allowance):
    """Half of an allowance for recent tokens, the odd one too, and half for heavy hitters."""
    return (allowance + 1) // 2, allowance // 2
