"""Which conversations of a bucket hang together, so that no interval takes them for independent; knows what they are made of, no more.

Conversations with a part in common, or told the same fact, directly or by way of others, are one cluster. Where many are joined of few,
all of a bucket soon hang together, and of fewer than `LEAST` clusters too little can be said: then only those made of the same parts are
one cluster, and the report says that its intervals may be too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LEAST = 10  # clusters that robust standard errors can reckon with


class Clusters(NamedTuple):
    """The cluster of each conversation by its id; how many groups those with parts in common are, and whether these are the clusters."""

    of: Mapping[str, str]
    groups: int
    whole: bool


def clusters(scripts: Sequence[Mapping[str, Any]]) -> Clusters:
    """Return the clusters of a bucket's conversations, given as its manifest has them: `id`, `sources` and `fact`."""
    same = {script["id"]: "+".join(sorted(script["sources"])) for script in scripts}
    hanging = _hanging(scripts)
    groups = len(set(hanging.values()))
    whole = groups >= min(LEAST, len(set(same.values())))
    return Clusters(hanging if whole else same, groups, whole)


def _hanging(scripts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return each conversation's group, called after its first one: the connected parts of what has sources or facts in common."""
    groups: list[tuple[set[tuple[str, str]], list[str]]] = []
    for script in scripts:
        own, ids = {("fact", script["fact"]), *(("source", source) for source in script["sources"])}, [script["id"]]
        apart = []
        for theirs, members in groups:
            if theirs & own:
                own, ids = own | theirs, [*members, *ids]
            else:
                apart.append((theirs, members))
        groups = [*apart, (own, ids)]
    return {one: ids[0] for _, ids in groups for one in ids}
