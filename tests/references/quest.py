"""Quest, slowly: which past tokens a decoded query reads, one page and one channel after another."""

import numpy


def bound(query, keys):
    """The most that a query [D] whose channels lie where those of keys [T, D] lie could score."""
    return sum(max(q * min(column), q * max(column)) for q, column in zip(query, keys.T, strict=True))


def read(queries, keys, *, page, allowance, least=1, per_query_head=False, newest=False, window=None):
    """Whether each query [H, G, D] reads each past token, [H, G, T], for keys [H, T, D]; of a window, its tokens only."""
    (heads, group, _), tokens = queries.shape, keys.shape[1]
    oldest = 0 if window is None else max(0, tokens - window + 1)  # the query itself is in the window too
    pages = [list(range(start, min(start + page, tokens))) for start in range(0, tokens, page)]
    pages = [page for page in pages if page[-1] >= oldest]
    held = tokens if window is None else min(tokens, window)
    count = len(pages) if allowance >= held else max(least, allowance // page)
    mask = numpy.zeros((heads, group, tokens), dtype=bool)
    for head in range(heads):
        bounds = [[bound(queries[head, member], keys[head, page]) for page in pages] for member in range(group)]
        for member in range(group):
            own = bounds[member] if per_query_head else [max(column) for column in zip(*bounds, strict=True)]
            if newest:
                own[-1] = float("inf")
            best = sorted(range(len(pages)), key=lambda number: (-own[number], number))[:count]
            for number in best:
                mask[head, member, [token for token in pages[number] if token >= oldest]] = True
    return mask
