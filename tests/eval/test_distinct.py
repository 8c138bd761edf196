"""Distinct answers of k samples, and the entropy of answers."""

import math
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.eval import distinct_at_k, entropy_of_answers


@given(answers=st.text(alphabet="abc-", min_size=1, max_size=9), k=st.integers(1, 9))
def test_the_estimate_is_the_mean_over_all_draws_without_replacement(answers, k):
    """`-` is an answer that is not of interest."""
    k = min(k, len(answers))
    each = [len({answer for answer in drawn if answer != "-"}) for drawn in combinations(answers, k)]
    counts = Counter(answer for answer in answers if answer != "-")
    assert distinct_at_k(counts.values(), len(answers), k) == pytest.approx(sum(each) / len(each))


def test_numbers_worked_by_hand():
    assert distinct_at_k([2, 1], 4, 2) == pytest.approx(5 / 6 + 3 / 6)  # missed by C(2,2) and C(3,2) of C(4,2) pairs
    assert distinct_at_k([], 4, 2) == 0
    assert entropy_of_answers([2, 1, 1]) == pytest.approx(math.log(2) / 2 + math.log(4) / 2)
    assert entropy_of_answers([]) == entropy_of_answers([7, 0]) == 0


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_the_entropy_is_at_most_that_of_equal_shares(counts):
    assert 0 <= entropy_of_answers(counts) <= math.log(len(counts)) + 1e-12


@pytest.mark.parametrize(("counts", "answers", "k"), [([1], 4, 5), ([1], 4, 0), ([3, 2], 4, 1), ([-1], 4, 1)])
def test_impossible_counts_are_refused(counts, answers, k):
    with pytest.raises(ConfigError, match="must be"):
        distinct_at_k(counts, answers, k)
