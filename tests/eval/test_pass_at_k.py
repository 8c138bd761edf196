"""pass@k: by hand, by enumeration of all subsets of k answers, and its expectation."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.eval import pass_at_k
from ludic.eval.statistics import curve_points


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs of 4 answers contain the right one
    assert pass_at_k(5, 2, 3) == 0.9  # 10 triples, of which one contains neither right answer
    assert pass_at_k(10, 3, 1) == 0.3
    assert pass_at_k(10, 0, 10) == 0.0
    assert pass_at_k(10, 1, 10) == 1.0
    assert pass_at_k(3, 2, 2) == 1.0  # only one answer is wrong


answers = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@given(answers)
def test_it_is_the_fraction_of_subsets_of_k_with_a_right_answer(case):
    n, c, k = case
    drawn = list(combinations([i < c for i in range(n)], k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, drawn)) / len(drawn))


@given(st.integers(1, 12), st.integers(1, 12), st.fractions(0, 1, max_denominator=20))
def test_its_expectation_is_the_probability_of_a_right_answer_among_k(n, k, p):
    """Over a binomial number of right answers, it is exactly 1 - (1 - p)^k for any n >= k."""
    if k > n:
        return
    expected = sum(
        comb(n, c) * p**c * (1 - p) ** (n - c) * Fraction(comb(n, k) - comb(n - c, k), comb(n, k)) for c in range(n + 1)
    )
    assert expected == 1 - (1 - p) ** k
    found = sum(float(comb(n, c) * p**c * (1 - p) ** (n - c)) * pass_at_k(n, c, k) for c in range(n + 1))
    assert found == pytest.approx(float(expected))


def test_large_numbers_neither_overflow_nor_lose_digits():
    assert pass_at_k(20_000, 1, 10_000) == 0.5
    assert pass_at_k(10**6, 1, 1) == 1e-6


def test_a_curve_has_the_powers_of_two_and_the_last_k():
    assert [curve_points(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def test_invalid_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"k \(5\) .*least 1 and at most 4"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ConfigError, match="k"):
        pass_at_k(4, 1, 0)
    with pytest.raises(ConfigError, match="right"):
        pass_at_k(4, 5, 1)
