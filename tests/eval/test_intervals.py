"""Confidence intervals: values by hand, properties, and measured coverage."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.eval.statistics import difference_interval, mean_interval, share_interval, student_quantile, wilson_interval

shares = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def test_wilson_by_hand():
    """8 of 10, z = 1.96: centre (8 + 1.9207) / 13.8415 = 0.71675; half-width 1.96 sqrt(8 * 2 / 10 +
    0.9604) / 13.8415 = 0.22659."""
    assert wilson_interval(8, 10) == pytest.approx((0.49016, 0.94334), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 3.8415 / 13.8415), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((10 / 13.8415, 1.0), abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == 1.0


def test_with_one_answer_per_problem_it_is_the_plain_wilson_interval():
    measured = share_interval([1.0] * 8 + [0.0] * 2)
    assert (measured.value, measured.num_problems) == (0.8, 10)
    assert (measured.low, measured.high) == pytest.approx(wilson_interval(8, 10))


def test_answers_count_as_far_as_the_problems_vary():
    """p = 1/2; squared error (1/4 + 0 + 1/4 + 0) / 16 = 1/32; effective number 1/4 / (1/32) = 8
    of the 16 answers."""
    measured = share_interval([0.0, 0.5, 1.0, 0.5], answers=16)
    assert (measured.low, measured.high) == pytest.approx(wilson_interval(4, 8))


def test_problems_without_variance_count_every_answer_or_at_the_edge_one_each():
    assert share_interval([0.5] * 4, answers=16).low == pytest.approx(wilson_interval(8, 16)[0])
    assert share_interval([1.0] * 4, answers=400).low == pytest.approx(wilson_interval(4, 4)[0])
    assert share_interval([0.0] * 4, answers=400).high == pytest.approx(wilson_interval(0, 4)[1])


@given(shares, st.integers(1, 64))
def test_an_interval_contains_its_share_and_lies_in_0_to_1(values, k):
    found = share_interval(values, answers=k * len(values))
    assert 0.0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1.0
    assert found.high > found.low


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(2, 50))
def test_repeating_the_same_answer_adds_no_evidence(right, k):
    """Asking a deterministic policy k times per problem does not narrow the interval."""
    once = share_interval([float(r) for r in right])
    again = share_interval([float(r) for r in right], answers=k * len(right))
    assert (again.low, again.high) == pytest.approx((once.low, once.high))


@given(shares, st.floats(0.5, 0.9), st.floats(0.01, 0.09))
def test_more_confidence_gives_a_wider_interval(values, confidence, more):
    narrow, wide = (share_interval(values, confidence=c) for c in (confidence, confidence + more))
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


def test_student_quantiles_match_the_tables():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042, 10**9: 1.960}
    for freedom, expected in table.items():
        assert student_quantile(0.95, freedom) == pytest.approx(expected, rel=2e-3)
    assert student_quantile(0.9, 9) == pytest.approx(1.833, rel=1e-3)


def test_a_mean_by_hand():
    """1, 2, 3: mean 2, s = 1, half-width 4.303 / sqrt(3) = 2.484."""
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.low, found.value, found.high) == pytest.approx((2 - 2.484, 2.0, 2 + 2.484), abs=1e-3)


def test_one_problem_gives_no_interval():
    found = mean_interval([3.0])
    assert (found.value, found.low, found.high) == (3.0, None, None)


def coverage(draw, interval, truth, runs=800):
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(runs):
        found = interval(draw(rng))
        hits += found.low <= truth <= found.high
    return hits / runs


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 2.0), (0.3, 0.3), (1.0, 9.0)])
@pytest.mark.parametrize("k", [1, 8])
def test_nineteen_of_twenty_intervals_contain_the_accuracy_over_all_problems(alpha, beta, k):
    """60 problems of random difficulty with k answers each."""

    def draw(rng):
        return list(rng.binomial(k, rng.beta(alpha, beta, 60)) / k)

    found = coverage(draw, lambda values: share_interval(values, answers=60 * k), alpha / (alpha + beta))
    assert 0.925 <= found <= 0.975


def test_treating_answers_as_independent_gives_too_narrow_intervals():
    """Why intervals are clustered: with 16 answers per problem and problems that differ, an
    interval for independent answers covers less than 70 % instead of 95 %."""
    rng = np.random.default_rng(6)
    hits = naive = 0
    for _ in range(300):
        right = rng.binomial(16, rng.beta(0.5, 0.5, 60))
        low, high = wilson_interval(float(right.sum()), 960.0)
        found = share_interval(list(right / 16), answers=960)
        naive += low <= 0.5 <= high
        hits += found.low <= 0.5 <= found.high
    assert naive / 300 < 0.7
    assert hits / 300 > 0.92


def test_nineteen_of_twenty_intervals_contain_a_mean_of_few_problems():
    found = coverage(lambda rng: list(rng.normal(3.0, 2.0, 5)), mean_interval, 3.0)
    assert 0.93 <= found <= 0.97


def test_invalid_numbers_are_refused():
    for successes, trials, said in ((-1, 10, r"successes \(-1\)"), (11, 10, r"successes \(11\)"), (0, 0, r"trials \(0\)")):
        with pytest.raises(ConfigError, match=said):
            wilson_interval(successes, trials)
    for confidence in (0, 1, 95):
        with pytest.raises(ConfigError, match="confidence"):
            wilson_interval(1, 2, confidence=confidence)
    for interval in (share_interval, mean_interval):
        with pytest.raises(ConfigError, match=r"number of problems \(0\) must be at least 1"):
            interval([])
    assert not math.isnan(share_interval([0.1 + 0.2 - 0.3] * 3).low)  # within rounding error of 0


def test_a_difference_of_shares_by_hand():
    """Newcombe 1998, method 10, on 56/70 against 48/80, his example (a): 0.2, from 0.0524 to
    0.3339."""
    before, after = [1.0] * 48 + [0.0] * 32, [1.0] * 56 + [0.0] * 14
    (late_low, late_high), (early_low, early_high) = wilson_interval(56, 70), wilson_interval(48, 80)
    low = 0.2 - math.hypot(0.8 - late_low, early_high - 0.6)
    high = 0.2 + math.hypot(late_high - 0.8, 0.6 - early_low)
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    with pytest.raises(ConfigError, match=r"before \(80\) and after \(70\)"):
        difference_interval(before, after)
    same = difference_interval([1.0, 0.0] * 35, after)
    (early_low, early_high) = wilson_interval(35, 70)
    assert same.value == pytest.approx(0.3)
    assert same.low == pytest.approx(0.3 - math.hypot(0.8 - late_low, early_high - 0.5))
    assert same.high == pytest.approx(0.3 + math.hypot(late_high - 0.8, 0.5 - early_low))


def test_a_difference_of_other_numbers_has_students_interval():
    """Differences 1, 2, 3: mean 2, s = 1, t = 4.303, half-width 4.303 / sqrt(3) = 2.484."""
    found = difference_interval([-1.0, 10.0, 5.0], [0.0, 12.0, 8.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-3)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
def test_a_difference_of_shares_is_antisymmetric(pairs):
    early, late = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = difference_interval(early, late), difference_interval(late, early)
    assert there.low is not None
    assert there.high is not None
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)
    assert -1 <= there.low <= there.value <= there.high <= 1


def test_two_equal_differences_still_give_a_wide_interval():
    """Student's interval of two equal differences would have width zero."""
    found = difference_interval([0.25, 0.25], [0.5, 0.5])
    assert found.low < 0 < found.high
