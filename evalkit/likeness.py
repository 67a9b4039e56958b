"""How alike two cells answer, right or wrong: same picks, Cohen's kappa, divergence of the choices; knows neither tasks nor policies."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_softmax
from sklearn.metrics import cohen_kappa_score

from .errors import UsageError
from .stats import Values, both


def agreement(full_pick: ArrayLike, pick: ArrayLike) -> float:
    """The share of documents ([n] chosen indices) with the same choice; wrong to another wrong is a change. Unequal: UsageError."""
    return float(np.equal(*both(full_pick, pick)).mean())


def kappa(full_pick: ArrayLike, pick: ArrayLike) -> float:
    """Cohen's kappa of the two choices (scikit-learn); nan where both always pick one and the same. Errors as `agreement`."""
    first, second = both(full_pick, pick)
    constant = np.unique([first, second]).size == 1  # scikit-learn warns
    return math.nan if constant else float(cohen_kappa_score(first, second))


def divergence(full_logprobs: Sequence[ArrayLike], logprobs: Sequence[ArrayLike]) -> float:
    """Mean over documents of KL(full || other) in nats, of the softmax (scipy) over each document's [choices] log-probabilities.

    A choice that is -inf under full adds nothing, under other alone makes the mean inf; choices that are all -inf count as equally
    likely. Raises UsageError for no documents and for unequal numbers of documents or choices.
    """
    if not len(full_logprobs) == len(logprobs) > 0:
        raise UsageError(f"{len(full_logprobs)} documents against {len(logprobs)}: give the same ones, at least one")
    sizes: dict[int, list[tuple[Values, Values]]] = {}
    for pair in zip(full_logprobs, logprobs, strict=True):
        sizes.setdefault(np.size(pair[0]), []).append(both(*pair))
    each = [_relative_entropies(*map(np.stack, zip(*same, strict=True))) for same in sizes.values()]
    return float(np.concatenate(each).mean())


def _relative_entropies(full: Values, other: Values) -> Values:
    """[n] KL(full || other) of two [n, choices]."""
    told = (np.where(np.isfinite(x).any(1, keepdims=True), x, 0.0) for x in (full, other))
    log_p, log_q = (log_softmax(x, axis=1) for x in told)
    # In logarithms, unlike scipy's rel_entr: a probability too small for a float is not an impossible choice.
    gaps = np.subtract(log_p, log_q, out=np.zeros_like(log_p), where=log_p != -math.inf)
    return (np.exp(log_p) * gaps).sum(1)
