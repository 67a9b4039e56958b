"""How alike two cells answer: agreement, kappa and divergence against published worked examples."""

import math

import numpy as np
import pytest

from evalkit import likeness
from evalkit.errors import UsageError


def test_agreement_counts_a_wrong_to_another_wrong_choice_as_a_change() -> None:
    assert likeness.agreement([0, 1, 2, 3], [0, 1, 3, 3]) == 0.75


def test_kappa_is_the_published_one() -> None:
    # Two readers of 50 proposals, 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no: 0.4, the example in Wikipedia's "Cohen's kappa".
    first, second = np.repeat([1, 1, 0, 0], [20, 5, 10, 15]), np.repeat([1, 0, 1, 0], [20, 5, 10, 15])
    assert likeness.kappa(first, second) == pytest.approx(0.4)
    assert likeness.kappa(first, first) == 1
    assert math.isnan(likeness.kappa([2, 2, 2], [2, 2, 2]))
    assert likeness.kappa([2, 2, 2], [1, 1, 1]) == 0


def test_divergence_is_the_published_one() -> None:
    # Kullback (1959), Information Theory and Statistics, example 2.1, as Wikipedia's article on the divergence works it:
    # from (9, 12, 4)/25, a binomial distribution, to the uniform one 0.0853 nats, and back 0.0975.
    p, q = np.log(np.array([9, 12, 4]) / 25), np.zeros(3)
    assert likeness.divergence([p], [q]) == pytest.approx((32 * math.log(2) + 55 * math.log(3) - 50 * math.log(5)) / 25)
    assert likeness.divergence([q], [p]) == pytest.approx((-4 * math.log(2) - 6 * math.log(3) + 6 * math.log(5)) / 3)
    assert likeness.divergence([p, [0.0, -1.0]], [q, [5.0, 4.0]]) == pytest.approx(0.0852996 / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("full", "other", "expected"),
    [
        ([0, -math.inf], [0, 0], math.log(2)),
        ([0, 0], [0, -math.inf], math.inf),
        ([0, -math.inf], [0, -math.inf], 0),
        ([-math.inf, -math.inf], [0, 0], 0),
        ([0, 0], [0, -2000], 1000 - math.log(2)),
        ([0, math.nan], [0, 0], math.nan),
    ],
)
def test_divergence_handles_impossible_choices(full: list[float], other: list[float], expected: float) -> None:
    assert likeness.divergence([full], [other]) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: likeness.agreement([1], [1, 2]),
        lambda: likeness.kappa([], []),
        lambda: likeness.divergence([], []),
        lambda: likeness.divergence([[0.0]], [[0.0], [0.0]]),
        lambda: likeness.divergence([[0.0, 0.0]], [[0.0]]),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(wrong) -> None:
    with pytest.raises(UsageError) as error:
        wrong()
    assert "\n" not in str(error.value)
