"""Intervals, paired tests and verdicts over arrays of right and wrong answers; knows neither tasks, policies nor files.

*Limits never meet.* A difference gets the score interval of Tango (1998, Statistics in Medicine 17:891), the relative of Wilson's
for pairs: with no flip among n documents it is +-z^2/(n + z^2), where a t-interval would be 0 wide and call any policy lossless.
(A t-interval with a special case for no flips would make one lost document look safer than none.)
*Clusters widen, never narrow.* Where documents share a passage, score intervals are stretched by the root of the design effect
(cluster-robust over plain variance, at least 1; Rao and Scott 1992, Biometrics 48:577) and use Student's t with C - 1 degrees of
freedom for C clusters. Few clusters that deviate tell little of how values cluster: the design effect is drawn towards that of full
correlation, under which each cluster counts once, as where values do not vary.
*Undefined is nan.* One cluster says nothing about its like: its limits are nan. Nothing here warns.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.stats import norm, sem, t
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from .errors import UsageError

LEVEL = 0.05  # of every interval: 95 % two-sided, so 97.5 % for a claim in one direction
TELLING = 10  # clusters that deviate from the others say as much of a design effect as is taken for granted before
QUANTILE = float(norm.ppf(1 - LEVEL / 2))

Values: TypeAlias = NDArray[Any]
Clusters: TypeAlias = Iterable[Hashable | None]
Verdict: TypeAlias = Literal["ok", "worse", "inconclusive"]


@dataclass(frozen=True)
class Proportion:
    """The share of `n` documents that are right, with its standard error and 95 % limits."""

    n: int
    value: float
    stderr: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """What a policy changes on `n` documents: other minus full as a share, its 95 % limits, and the answers lost and gained."""

    n: int
    value: float
    stderr: float
    low: float
    high: float
    lost: int
    gained: int
    p: float


@dataclass(frozen=True)
class Knee:
    """The smallest budget that is fine, None where none is, and whether all larger ones are fine too."""

    budget: float | None
    monotone: bool


def proportion(correct: ArrayLike, clusters: Clusters | None = None) -> Proportion:
    """Accuracy over `correct` ([n] of 0/1) with Wilson's interval (statsmodels `proportion_confint`).

    `stderr` is lm-eval's, sample deviation over the root of n (scipy `sem`), or the cluster-robust one when `clusters` ([n] labels,
    None for a document of its own) are given. Raises UsageError for no documents, values but 0 and 1, and labels not n.
    """
    right = _answers(correct)
    groups = None if clusters is None else _groups(clusters, right.size)
    reach = t.ppf(1 - LEVEL / 2, _freedom(groups)) * _stretch(right, groups)
    effective = right.size * (QUANTILE / reach) ** 2
    low, high = proportion_confint(right.mean() * effective, effective, alpha=LEVEL, method="wilson")
    return Proportion(right.size, float(right.mean()), _stderr(right, groups), float(low), float(high))


def paired(full: ArrayLike, other: ArrayLike, clusters: Clusters | None = None) -> Difference:
    """The difference `other` minus `full`, both [n] of 0/1 on the same documents in the same order.

    `stderr` is sd/sqrt(n) of the differences or, with `clusters`, the cluster-robust one: statsmodels OLS on a constant, which is
    the formula of Miller (2024, arXiv 2411.00640) times sqrt(C/(C-1)). It is 0 where nothing flipped; the limits are not (see the
    module). `p` is McNemar's exact test (statsmodels), which takes documents as independent; with clusters it is the larger of
    that and the stretched score test, which belongs to the interval. Raises UsageError as `proportion`, and for unequal lengths.
    """
    change = np.subtract(*both(_answers(other), _answers(full)))
    groups = None if clusters is None else _groups(clusters, change.size)
    lost, gained = int((change < 0).sum()), int((change > 0).sum())
    freedom, stretch = _freedom(groups), _stretch(change, groups)
    p = float(mcnemar([[0, lost], [gained, 0]], exact=True).pvalue)
    if groups is not None:
        score = abs(gained - lost) / math.sqrt(max(1, gained + lost))
        p = float(np.maximum(p, 2 * t.sf(score / stretch, freedom)))  # a nan stays
    low, high = _score_limits(lost, gained, change.size, t.ppf(1 - LEVEL / 2, freedom) * stretch)
    return Difference(change.size, float(change.mean()), _stderr(change, groups), low, high, lost, gained, p)


def average(differences: Sequence[Difference]) -> Difference:
    """The unweighted mean over tasks; n, lost and gained are summed, stderr is sqrt(sum of squares)/k.

    The limits square and add each task's own distances from value to limit (MOVER: Zou and Donner 2008, Statistics in Medicine
    27:1693): the normal interval where the tasks' are normal, and wider than 0 where no task flipped. `p` is two-sided and below
    0.05 exactly where the interval excludes 0. Raises UsageError for no tasks.
    """
    if not differences:
        raise UsageError("no tasks to average: give at least one difference")
    value, stderr, low, high = np.array([(d.value, d.stderr, d.low, d.high) for d in differences]).T
    n, lost, gained = (sum(counts) for counts in zip(*((d.n, d.lost, d.gained) for d in differences), strict=True))
    mean = float(value.mean())
    error, below, above = (float(np.linalg.norm(part)) / len(value) for part in (stderr, value - low, high - value))
    p = float(2 * norm.sf(QUANTILE * abs(mean) / (below if mean > 0 else above)))
    return Difference(n, mean, error, mean - below, mean + above, lost, gained, p)


def holm(p_values: ArrayLike) -> Values:
    """Holm's step-down adjusted p-values (statsmodels `multipletests`), [k] as given; nan stays nan and does not count."""
    raw = np.asarray(p_values, dtype=float)
    known = ~np.isnan(raw)
    adjusted = np.full(raw.shape, math.nan)
    if known.any():
        adjusted[known] = multipletests(raw[known], alpha=LEVEL, method="holm")[1]
    return adjusted


def detectable(lost: int, gained: int, n: int, power: float = 0.8, level: float = LEVEL) -> float:
    """The smallest difference (a share) that n documents show with this power: (z_{1-level/2} + z_power) sqrt(flip rate / n).

    The flip rate is the observed one, but no less than Wilson's upper limit for no flips among n: few flips say as little about
    the rate as none, and the answer is never 0. Documents are taken as independent.
    """
    rate = max((lost + gained) / n, proportion_confint(0, n, alpha=LEVEL, method="wilson")[1])
    return float((norm.ppf(1 - level / 2) + norm.ppf(power)) * math.sqrt(rate / n))


def verdict(difference: Difference, margin: float) -> Verdict:
    """`ok` if the lower limit is above -margin (a share: 0.01 is a point), else `worse` if the upper is below 0.

    A certain loss within the margin is `ok`; nan is `inconclusive`. With no flip a margin of 0.01 takes 381 independent documents.
    """
    if difference.low > -margin:
        return "ok"
    return "worse" if difference.high < 0 else "inconclusive"


def knee(cells: Iterable[tuple[float, bool, bool, float]]) -> Knee:
    """The headline of a policy, over its (budget, fine, floor, acted share of the prompts) cells: the smallest that is fine.

    `fine` is the caller's reading: a verdict of `ok`, or not significantly worse. The headline is not the one from which all larger
    are fine, as chance often makes a larger one look worse; `monotone` says whether it did. Cells at their floor, or that acted on
    less than half of the prompts, say nothing about their budget: they make and break no knee.
    """
    counted = [(budget, fine) for budget, fine, floor, acted in cells if not floor and acted >= 0.5]
    smallest = min((budget for budget, fine in counted if fine), default=None)
    return Knee(smallest, smallest is not None and all(fine for budget, fine in counted if budget > smallest))


def pareto(cost: ArrayLike, value: ArrayLike) -> NDArray[np.bool_]:
    """Which of [k] points no other beats, being cheaper and as good or better and as cheap; equal ones stay, those with nan go."""
    price, worth = np.asarray(cost, dtype=float), np.asarray(value, dtype=float)
    as_good = (price[:, None] <= price) & (worth[:, None] >= worth)
    return ~(as_good & ~as_good.T).any(axis=0) & ~np.isnan(price + worth)


def _answers(values: ArrayLike) -> Values:
    answers = np.asarray(values, dtype=float)
    if answers.ndim != 1 or not answers.size or not np.isin(answers, (0, 1)).all():
        raise UsageError(f"answers of shape {answers.shape}: give a 0 or 1 for each document, at least one")
    return answers


def both(first: ArrayLike, second: ArrayLike) -> tuple[Values, Values]:
    """Return two arrays of one shape with at least one value. Raises UsageError for others."""
    one, two = np.asarray(first), np.asarray(second)
    if one.shape != two.shape or not one.size:
        raise UsageError(f"{one.size} values against {two.size}: give both sides of the same documents and choices, at least one")
    return one, two


def _groups(clusters: Clusters, n: int) -> Values:
    """[n] numbers from 0, one for each label and one for each document without a label."""
    numbers: dict[object, int] = {}
    groups = [numbers.setdefault((place,) if label is None else ("", label), len(numbers)) for place, label in enumerate(clusters)]
    if len(groups) != n:
        raise UsageError(f"{len(groups)} cluster labels for {n} documents: give one for each, None for a document of its own")
    return np.array(groups)


def _freedom(groups: Values | None) -> float:
    """Degrees of freedom of Student's t: infinite, the normal's, without clusters; with one cluster 0, which makes t nan."""
    return math.inf if groups is None else int(groups.max())


def _stderr(values: Values, groups: Values | None) -> float:
    """Of the mean: plain, or cluster-robust; nan for a single document or cluster."""
    if min(values.size - 1, _freedom(groups)) < 1:  # both libraries warn
        return math.nan
    model = OLS(values, np.ones(values.size))
    return float(sem(values) if groups is None else model.fit(cov_type="cluster", cov_kwds={"groups": groups}).bse[0])


def _stretch(values: Values, groups: Values | None) -> float:
    """The root of the design effect: how much wider clusters make an interval.

    It is told by the clusters that have a value other than the commonest, and few of them tell next to nothing. So the estimate is drawn
    towards full correlation (the mean over documents of their clusters' sizes), by so much that one more lost document never looks safer.
    """
    if groups is None:
        return 1.0
    most = float((np.bincount(groups) ** 2).sum()) / values.size
    found, counts = np.unique(values, return_counts=True)
    odd = np.unique(groups[values != found[counts.argmax()]]).size
    if not odd:
        return math.sqrt(most)
    seen = max(1.0, (_stderr(values, groups) / _stderr(values, None)) ** 2)
    prior = max(TELLING, 2 * most)
    return math.sqrt((prior * most + odd * seen) / (prior + odd))


def _score_limits(lost: int, gained: int, n: int, reach: float) -> tuple[float, float]:
    """Where Tango's score statistic of the difference is `reach`; no library here has it, its roots are scipy's `brentq`."""
    if math.isnan(reach):
        return math.nan, math.nan

    def excess(difference: float) -> float:
        # Squared and multiplied out, so that it is defined where the variance is 0; negative between the limits.
        linear = (2 * n + lost - gained) * difference - lost - gained
        constant = -lost * difference * (1 - difference)
        loss_rate = (math.sqrt(max(0.0, linear**2 - 8 * n * constant)) - linear) / (4 * n)  # its likeliest value at this difference
        return (gained - lost - n * difference) ** 2 - reach**2 * n * (2 * loss_rate + difference * (1 - difference))

    value = (gained - lost) / n
    low, high = (brentq(excess, value + 1e-12 * end, end) if value != end else end for end in (-1.0, 1.0))
    return float(low), float(high)
