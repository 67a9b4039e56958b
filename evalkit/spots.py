"""What one cell shows on one task beside the cell it is compared with, and on the mean of its tasks; knows no run and no file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import likeness, stats
from .errors import UsageError
from .runs import Answers

HALF = 0.5  # of the prompts: a policy that acted on fewer tells little
METRIC, NORMED = "acc", "acc_norm"
Entry = dict[str, Any]
Clusters = Sequence[str | None] | None  # the label of each document, None for one of its own


@dataclass(frozen=True)
class Spot:
    """The numbers of one cell on one task (`entry`, as a report shows them), and what they are judged by."""

    entry: Entry
    difference: stats.Difference | None = None  # None for a cell that others are compared with
    same: bool = False  # asks for everything and picked what full picked, so it is the full cache
    weak: bool = False  # its budget says little: it acted on too few prompts, or holds more than it was granted


def spot(base: Answers | None, other: Answers, clusters: Clusters, *, whole: bool = False, weak: bool = False) -> Spot:
    """Compare `other` with `base`, both on the same documents; `whole` says that it asks for everything.

    Raises UsageError for a task without accuracy.
    """
    entry = _accuracy(other, clusters)
    if base is None:
        return Spot(entry | _changed(None) | dict.fromkeys(("lost", "gained", "agreement", "kappa", "kl", "detectable")), weak=weak)
    difference = stats.paired(_correct(base), _correct(other), clusters)
    same = whole and bool((base.picks == other.picks).all())
    return Spot(entry | _changed(difference) | _churn(base, other, difference), difference, same, weak)


def mean(spots: Sequence[Spot]) -> Spot:
    """Return the unweighted mean of a cell's tasks."""
    differences = [each.difference for each in spots if each.difference]
    errors = [math.nan if each.entry["stderr"] is None else each.entry["stderr"] for each in spots]
    difference = stats.average(differences) if differences else None
    entry = {
        "accuracy": float(np.mean([each.entry["accuracy"] for each in spots])),
        "stderr": known(float(np.linalg.norm(errors)) / len(spots)),
        **_changed(difference),
    }
    return Spot(entry, difference, all(each.same for each in spots), any(each.weak for each in spots))


def judge(spots: Sequence[Spot], margin: float) -> None:
    """Write into the entries of one task's cells what Holm's adjustment over them all leaves of each p, and the verdicts.

    A cell that is the full cache itself (`same`) is no hypothesis: it is left out of the adjustment and is ok. A weak cell is never ok.
    """
    family = [each for each in spots if each.difference and not each.same]
    adjusted = stats.holm([each.difference.p for each in family if each.difference])
    for each, p in zip(family, adjusted.tolist(), strict=True):
        each.entry.update(p_holm=known(p), significant=p < stats.LEVEL)
    for each in spots:
        if each.difference:
            found = "ok" if each.same else stats.verdict(each.difference, margin)
            each.entry["verdict"] = "inconclusive" if each.weak and found == "ok" else found
            each.entry["significant"] = bool(each.entry["significant"])


def furthest(base: Answers, other: Answers) -> float:
    """Return the most, in nats, that a log-likelihood of one differs from the other's; an impossible choice equals another one."""
    one, two = np.concatenate(base.logprobs), np.concatenate(other.logprobs)
    differ = one != two
    return float(np.abs(one[differ] - two[differ]).max(initial=0.0))


def known(value: float) -> float | None:
    """A number as JSON can hold it: None for what is undefined or without bound."""
    return float(value) if math.isfinite(value) else None


def _correct(answers: Answers) -> Any:
    """[n] of 0 and 1."""
    if METRIC not in answers.metrics:
        raise UsageError(f"a task has no {METRIC} (it has {', '.join(answers.metrics)}): give runs of tasks with choices")
    return answers.metrics[METRIC]


def _accuracy(answers: Answers, clusters: Clusters) -> Entry:
    rate = stats.proportion(_correct(answers), clusters)
    norm = stats.proportion(answers.metrics[NORMED], clusters) if NORMED in answers.metrics else None
    return {
        "n": rate.n,
        "accuracy": rate.value,
        **{name: known(getattr(rate, name)) for name in ("stderr", "low", "high")},
        "acc_norm": norm.value if norm else None,
        "acc_norm_stderr": known(norm.stderr) if norm else None,
    }


def _changed(difference: stats.Difference | None) -> Entry:
    """A difference with its interval and p, to be judged; None throughout where there is none."""
    at = {"difference": "value", "difference_low": "low", "difference_high": "high", "p": "p"}
    found = {name: known(getattr(difference, field)) if difference else None for name, field in at.items()}
    return {**found, "p_holm": None, "significant": None, "verdict": None}


def _churn(base: Answers, other: Answers, difference: stats.Difference) -> Entry:
    """What the answers did beneath the accuracy, and the smallest difference that this many documents would show."""
    return {
        "lost": difference.lost,
        "gained": difference.gained,
        "agreement": likeness.agreement(base.picks, other.picks),
        "kappa": known(likeness.kappa(base.picks, other.picks)),
        "kl": known(likeness.divergence(base.logprobs, other.logprobs)),
        "detectable": stats.detectable(difference.lost, difference.gained, difference.n),
    }
