"""The statistics against published worked examples, hand computations, and what must hold for any data."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import norm
from statsmodels.stats.power import NormalIndPower

from evalkit import stats
from evalkit.errors import UsageError


def flipped(lost: int, gained: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers under full and under a policy with that many flips; the others are right twice."""
    full, other = np.ones(n), np.ones(n)
    other[:lost] = 0
    full[lost : lost + gained] = 0
    return full, other


def difference(lost: int, gained: int, n: int) -> stats.Difference:
    return stats.paired(*flipped(lost, gained, n))


def within_clusters(rng: np.random.Generator, clusters: int, size: int, lost: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Answers where whole clusters are lost at the given rate."""
    labels = np.repeat(np.arange(clusters), size)
    return np.ones(clusters * size), np.repeat(rng.random(clusters) >= lost, size).astype(float), labels


# Newcombe (1998), Statistics in Medicine 17:857, table I, method 3.
@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_an_accuracy_has_the_published_wilson_interval(right: int, n: int, low: float, high: float) -> None:
    found = stats.proportion(np.arange(n) < right)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert (found.n, found.value) == (n, right / n)


def test_the_standard_error_of_an_accuracy_is_lm_evals() -> None:
    answers = np.array([1, 1, 0, 1, 0, 1, 1])
    assert stats.proportion(answers).stderr == pytest.approx(math.sqrt(5 / 7 * 2 / 7 * 7 / 6 / 7))  # p(1-p)n/(n-1) over n


# Fagerland, Lydersen and Laake (2014), Statistics in Medicine 33:2850, tables II and V, and their R package contingencytables
# (chapter 8) for the airways of 21 children (7 against 1) and the response of 161 patients (16 against 6).
@pytest.mark.parametrize(
    ("lost", "gained", "n", "low", "high", "digits"), [(7, 1, 21, -0.517, -0.026, 5e-4), (16, 6, 161, -0.1240, -0.0054, 5e-5)]
)
def test_a_difference_has_the_published_score_interval(
    lost: int, gained: int, n: int, low: float, high: float, digits: float
) -> None:
    found = difference(gained, lost, n)
    assert (found.low, found.high) == (pytest.approx(-high, abs=digits), pytest.approx(-low, abs=digits))
    found = difference(lost, gained, n)
    assert (found.low, found.high) == (pytest.approx(low, abs=digits), pytest.approx(high, abs=digits))


# Fagerland, Lydersen and Laake (2013), BMC Medical Research Methodology 13:91 (0.070) and contingencytables (0.052479);
# Armitage and Berry (1994), Statistical Methods in Medical Research, p. 127, as StatsDirect works it (0.0129);
# the exact test of 59 against 80 in statsmodels' own tests, from VassarStats (0.089452).
@pytest.mark.parametrize(
    ("lost", "gained", "p"), [(7, 1, 0.0703), (16, 6, 0.052479), (12, 2, 0.0129), (59, 80, 0.089452), (10, 10, 1), (0, 0, 1)]
)
def test_p_is_the_published_exact_mcnemar(lost: int, gained: int, p: float) -> None:
    assert difference(lost, gained, 200).p == pytest.approx(p, abs=6e-5)


def test_a_difference_counts_its_flips_and_has_the_paired_standard_error() -> None:
    found = stats.paired([1, 1, 0, 0, 1], [0, 1, 1, 0, 0])
    assert (found.n, found.lost, found.gained, found.value) == (5, 2, 1, pytest.approx(-0.2))
    assert found.stderr == pytest.approx(math.sqrt((3 - 5 * 0.04) / 4 / 5))


def test_clusters_have_the_published_standard_error() -> None:
    rng = np.random.default_rng(1)
    full, other, labels = rng.integers(0, 2, 60), rng.integers(0, 2, 60), rng.integers(0, 12, 60)
    change = other - full
    # Miller (2024), arXiv 2411.00640: the squared error plus every cross term within a cluster, here over n^2.
    same = labels[:, None] == labels
    miller = math.sqrt((np.outer(change - change.mean(), change - change.mean()) * same).sum()) / 60
    assert stats.paired(full, other, labels).stderr == pytest.approx(miller * math.sqrt(12 / 11))
    assert stats.proportion(other, labels).stderr == pytest.approx(
        math.sqrt((np.outer(other - other.mean(), other - other.mean()) * same).sum() * 12 / 11) / 60
    )


def test_the_standard_error_of_three_clusters_by_hand() -> None:
    # Changes -1 -1 | 0 0 | 0 1 around their mean -1/6 sum to -5/3, 1/3, 4/3 within clusters: squares 42/9, times 3/2, over 36.
    found = stats.paired([1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], ["a", "a", "b", "b", "c", "c"])
    assert found.stderr == pytest.approx(math.sqrt(42 / 9 * 3 / 2 / 36))


# By hand: the sorted 0.005 0.01 0.03 0.04 times 4 3 2 1, never falling; GeeksforGeeks' worked example rejects the same two.
# Then R's p.adjust(method="holm") of 0.002 to 0.012, from multtest, in statsmodels' own tests.
@pytest.mark.parametrize(
    ("raw", "adjusted"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.002, 0.004, 0.006, 0.008, 0.01, 0.012], [0.012, 0.02, 0.024, 0.024, 0.024, 0.024]),
        ([0.01, math.nan, 0.04, 0.03, math.nan, 0.005], [0.03, math.nan, 0.06, 0.06, math.nan, 0.02]),
        ([math.nan], [math.nan]),
        ([], []),
    ],
)
def test_holm_is_the_published_one_and_leaves_nan_out(raw: list[float], adjusted: list[float]) -> None:
    assert stats.holm(raw) == pytest.approx(adjusted, nan_ok=True)


def test_without_a_flip_the_interval_is_wilsons_and_never_ok_on_eight_documents() -> None:
    found = difference(0, 0, 8)
    assert (found.stderr, found.p) == (0, 1)
    assert found.high == -found.low == pytest.approx(stats.proportion(np.zeros(8)).high)
    assert stats.verdict(found, 0.01) == "inconclusive"


def test_a_margin_of_one_point_takes_381_documents_without_a_flip() -> None:
    assert [stats.verdict(difference(0, 0, n), 0.01) for n in (380, 381)] == ["inconclusive", "ok"]


def test_more_lost_documents_never_look_safer() -> None:
    lows = [difference(lost, 0, 300).low for lost in range(20)]
    assert all(more < fewer for fewer, more in pairwise(lows))


@pytest.mark.parametrize(("clusters", "size"), [(16, 6), (50, 6), (200, 2), (50, 12), (40, 40), (50, 1)])
def test_more_lost_documents_never_look_safer_in_clusters(clusters: int, size: int) -> None:
    labels = [place // size for place in range(clusters * size)]
    lost = lambda count: [int(place % size > 0 or place // size >= count) for place in range(clusters * size)]  # noqa: E731
    lows = [stats.paired([1] * len(labels), lost(count), labels).low for count in range(min(clusters, 40) + 1)]
    assert all(more < fewer for fewer, more in pairwise(lows))


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 1), (3, 3), (9, 0), (0, 9)])
@pytest.mark.parametrize("n", [9, 10, 10042])
def test_limits_lie_around_the_difference_and_inside_what_is_possible(lost: int, gained: int, n: int) -> None:
    found = difference(lost, gained, n)
    assert -1 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high


def test_one_document_says_next_to_nothing() -> None:
    found = difference(1, 0, 1)
    assert math.isnan(found.stderr) and (found.low, found.p) == (-1, 1) and found.high > 0.5
    assert math.isnan(stats.proportion([1]).stderr) and stats.proportion([1]).low == pytest.approx(1 / (1 + norm.ppf(0.975) ** 2))


def test_one_cluster_says_nothing() -> None:
    found = stats.paired([1, 1, 1, 0], [1, 0, 1, 1], ["passage"] * 4)
    assert found.value == 0 and all(math.isnan(x) for x in (found.stderr, found.low, found.high, found.p))
    assert stats.verdict(found, 0.01) == "inconclusive"
    accuracy = stats.proportion([1, 1, 0, 1], ["passage"] * 4)
    assert accuracy.value == 0.75 and all(math.isnan(x) for x in (accuracy.stderr, accuracy.low, accuracy.high))


def test_clusters_without_a_flip_count_once_each() -> None:
    full, other, labels = within_clusters(np.random.default_rng(0), 100, 8, 0)
    found = stats.paired(full, other, labels)
    assert found.p == 1 and found.high > difference(0, 0, 100).high > difference(0, 0, 800).high


def test_clusters_of_one_document_change_no_error_and_little_else() -> None:
    full, other = flipped(12, 5, 100)
    alone, together = stats.paired(full, other), stats.paired(full, other, [None] * 100)
    assert together.stderr == pytest.approx(alone.stderr)
    assert together.low == pytest.approx(alone.low, abs=0.002) and together.low < alone.low
    assert stats.paired(full, other, range(100)) == together


def test_clusters_never_narrow_an_interval_nor_lower_p() -> None:
    full, other = flipped(8, 8, 64)
    labels = [*range(8), *range(8), *range(8, 56)]  # each cluster loses and gains one, so that its sum never varies
    alone, together = stats.paired(full, other), stats.paired(full, other, labels)
    assert together.stderr == pytest.approx(0)
    assert together.low < alone.low < alone.high < together.high and together.p >= alone.p


def test_flips_of_whole_clusters_are_worth_one_each() -> None:
    full, other, labels = within_clusters(np.random.default_rng(3), 20, 10, 0.3)
    found = stats.paired(full, other, labels)
    alone = stats.paired(full[::10], other[::10])
    assert found.lost == 10 * alone.lost > 30
    assert found.p > alone.p / 2 > 1e3 * stats.paired(full, other).p
    # Student's t over 20 clusters and the correction C/(C-1) make it a little wider than the normal one over 20 documents.
    assert found.low < alone.low < alone.high < found.high
    assert found.high - found.low == pytest.approx(alone.high - alone.low, rel=0.15)


def test_an_accuracy_of_whole_clusters_has_the_interval_of_as_many_documents() -> None:
    _, right, labels = within_clusters(np.random.default_rng(3), 200, 5, 0.3)
    found, alone = stats.proportion(right, labels), stats.proportion(right[::5])
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high), abs=0.002)


def test_the_order_of_documents_and_the_names_of_clusters_do_not_matter() -> None:
    rng = np.random.default_rng(4)
    full, other, labels = rng.integers(0, 2, 90), rng.integers(0, 2, 90), rng.integers(0, 15, 90)
    order = rng.permutation(90)
    names = [f"passage {label}" for label in labels[order]]
    for before, after in [
        (stats.paired(full, other), stats.paired(full[order], other[order])),
        (stats.paired(full, other, labels), stats.paired(full[order], other[order], names)),
        (stats.proportion(full, labels), stats.proportion(full[order], names)),
    ]:
        assert [getattr(after, name) for name in vars(before)] == pytest.approx(list(vars(before).values()))


def test_swapping_the_sides_mirrors_a_difference() -> None:
    full, other = flipped(9, 4, 80)
    there, back = stats.paired(full, other), stats.paired(other, full)
    assert (back.low, back.high, back.value) == pytest.approx((-there.high, -there.low, -there.value))
    assert (back.lost, back.gained, back.p) == (there.gained, there.lost, there.p)


@pytest.mark.parametrize(("lost", "gained", "n"), [(0.02, 0.01, 100), (0.01, 0, 300), (0.1, 0.05, 50), (0.03, 0.03, 300)])
def test_the_interval_covers_the_truth(lost: float, gained: float, n: int) -> None:
    draws = np.random.default_rng(5).multinomial(n, [lost, gained, 1 - lost - gained], size=1500)
    found = [difference(*map(int, counts), n) for counts in np.unique(draws, axis=0)[:, :2]]
    weights = np.unique(draws, axis=0, return_counts=True)[1] / 1500
    covered = [one.low <= gained - lost <= one.high for one in found]
    assert weights @ covered > 0.925


def test_ok_at_a_loss_of_the_whole_margin_is_as_rare_as_it_claims() -> None:
    draws = np.random.default_rng(6).binomial(400, 0.01, size=4000)
    values, counts = np.unique(draws, return_counts=True)
    wrong = [stats.verdict(difference(int(lost), 0, 400), 0.01) == "ok" for lost in values]
    assert counts @ wrong / 4000 < 0.03


def test_the_clustered_interval_covers_the_truth_where_the_plain_one_does_not() -> None:
    rng = np.random.default_rng(7)
    clustered, plain = 0, 0
    for _ in range(300):
        full, other, labels = within_clusters(rng, 40, 6, 0.15)
        found, alone = stats.paired(full, other, labels), stats.paired(full, other)
        clustered += found.low <= -0.15 <= found.high
        plain += alone.low <= -0.15 <= alone.high
    assert clustered / 300 > 0.92 > 0.8 > plain / 300


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.009, 0.02, "ok"),
        (-0.009, -0.001, "ok"),
        (-0.01, 0.02, "inconclusive"),
        (-0.05, -0.02, "worse"),
        (-0.05, 0, "inconclusive"),
        (math.nan, math.nan, "inconclusive"),
    ],
)
def test_a_verdict_reads_the_limits(low: float, high: float, expected: str) -> None:
    assert stats.verdict(stats.Difference(100, (low + high) / 2, 0.01, low, high, 3, 2, 1.0), 0.01) == expected


@pytest.mark.parametrize(("n", "points"), [(100, 8.9), (500, 4.0), (1267, 2.5), (1838, 2.1), (3270, 1.5), (10042, 0.9)])
def test_the_detectable_difference_at_ten_percent_flips(n: int, points: float) -> None:
    share = stats.detectable(n // 20, n // 10 - n // 20, n)
    assert share == pytest.approx(points / 100, abs=6e-4)
    deviation = math.sqrt((n // 10) / n)
    assert NormalIndPower().power(share / deviation, n, 0.05, ratio=0) == pytest.approx(0.8, abs=1e-3)


def test_the_detectable_difference_is_never_0_and_grows_with_the_flips() -> None:
    shares = [stats.detectable(lost, 0, 100) for lost in range(20)]
    assert shares[0] == pytest.approx(2.8016 * math.sqrt(stats.proportion(np.zeros(100)).high / 100), rel=1e-4)
    assert all(more >= fewer for fewer, more in pairwise(shares)) and shares[-1] > 2 * shares[0]


def test_an_average_of_tasks_is_unweighted_with_errors_in_quadrature() -> None:
    tasks = [difference(300, 200, 10000), difference(120, 160, 2000), difference(90, 60, 1000)]
    found = stats.average(tasks)
    error = math.sqrt(sum(task.stderr**2 for task in tasks)) / 3
    assert (found.n, found.lost, found.gained) == (13000, 510, 420)
    assert (found.value, found.stderr) == pytest.approx(((-0.01 + 0.02 - 0.03) / 3, error))
    assert (found.low, found.high) == pytest.approx((found.value - 1.96 * error, found.value + 1.96 * error), abs=2e-4)
    assert found.p == pytest.approx(2 * norm.sf(abs(found.value) / error), abs=0.01)


def test_an_average_is_significant_exactly_where_its_interval_excludes_0() -> None:
    found = [stats.average([difference(lost, gained, 30), difference(lost, 0, 30)]) for lost in range(12) for gained in range(12)]
    assert {one.p < 0.05 for one in found} == {True, False}
    assert all((one.p < 0.05) == (one.high < 0 or one.low > 0) for one in found)


def test_an_average_of_tasks_without_a_flip_keeps_its_width() -> None:
    tasks = [difference(0, 0, 300)] * 4
    found = stats.average(tasks)
    assert (found.stderr, found.p) == (0, 1)
    assert (found.low, found.high) == pytest.approx((tasks[0].low / 2, tasks[0].high / 2))


def test_an_average_with_an_undefined_task_is_undefined() -> None:
    found = stats.average([difference(3, 1, 50), stats.paired([1, 1], [1, 0], ["a", "a"])])
    assert found.value == pytest.approx((-0.04 - 0.5) / 2)
    assert all(math.isnan(x) for x in (found.stderr, found.low, found.high, found.p))


def test_a_knee_is_the_smallest_fine_budget() -> None:
    assert stats.knee([(1.0, True, False, 1), (0.2, True, False, 1), (0.1, False, False, 1)]) == stats.Knee(0.2, True)
    assert stats.knee([(0.1, True, False, 1), (0.2, False, False, 1), (0.3, True, False, 1)]) == stats.Knee(0.1, False)
    assert stats.knee([(0.1, False, False, 1)]) == stats.knee([]) == stats.Knee(None, False)


def test_cells_at_their_floor_and_cells_that_hardly_acted_neither_make_nor_break_a_knee() -> None:
    silent = [(0.02, True, True, 1), (0.04, True, False, 0.49), (0.5, False, True, 1), (1.0, False, False, 0)]
    assert stats.knee([*silent, (0.1, True, False, 0.5)]) == stats.Knee(0.1, True)


def test_the_pareto_front_keeps_ties_and_leaves_out_what_is_beaten() -> None:
    cost = [1, 2, 2, 3, 3, 4, math.nan, 1]
    value = [5, 7, 7, 7, 9, 8, 99, 4]
    assert stats.pareto(cost, value).tolist() == [True, True, True, False, True, False, False, False]
    assert stats.pareto([], []).tolist() == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: stats.proportion([]),
        lambda: stats.proportion([0, 0.5]),
        lambda: stats.proportion([0, math.nan]),
        lambda: stats.proportion([[0, 1]]),
        lambda: stats.proportion([0, 1], ["a"]),
        lambda: stats.paired([0, 1], [0]),
        lambda: stats.paired([0, 1], [0, 2]),
        lambda: stats.average([]),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(wrong) -> None:
    with pytest.raises(UsageError) as error:
        wrong()
    assert "\n" not in str(error.value)
