"""The entropies of the weights of plain and of seeded answers."""

from math import log

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic.training.info_seed.weight_entropies import sum_weight_entropies


def test_two_groups_by_hand():
    """Group 5: plain .1 .1 -> log 2 = .69314718; seeded .2 .6 -> .25 and .75, -.25 log .25 - .75
    log .75 = .34657359 + .21576155 = .56233514. Group 2: plain .5 -> 0; seeded .25 .25 -> log 2.
    Group 9 has no seeded answer. Rows of the groups alternate."""
    weights = [0.1, 0.5, 0.2, 0.25, 0.1, 0.25, 0.6, 1.0]
    groups = [5, 2, 5, 2, 5, 2, 5, 9]
    seeds = [0, 0, 1, 1, -1, 2, 2, 0]
    plain, seeded, count = sum_weight_entropies(weights, groups, seeds)
    assert (plain, seeded, count) == (pytest.approx(0.69314718), pytest.approx(0.56233514 + 0.69314718), 2)


def test_a_group_without_weight_in_one_kind_is_left_out():
    assert sum_weight_entropies([0.0, 0.0, 1.0], [0, 0, 0], [0, 0, 1]) == (0, 0, 0)
    assert sum_weight_entropies([], [], []) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.floats(1e-6, 1), st.integers(0, 3), st.integers(-1, 3)), max_size=16), st.floats(0.1, 10), st.randoms()
)
def test_scale_and_order_do_not_matter(rows, factor, random):
    """Against the definition, group by group."""
    expected = [0.0, 0.0, 0]
    for group in {row[1] for row in rows}:
        kinds = [[w for w, g, seed in rows if g == group and (seed >= 1) == seeded] for seeded in (False, True)]
        if all(kinds):
            entropies = [-sum(w / sum(kind) * log(w / sum(kind)) for w in kind) for kind in kinds]
            expected = [expected[0] + entropies[0], expected[1] + entropies[1], expected[2] + 1]
    random.shuffle(rows)
    weights, groups, seeds = (np.array([row[column] for row in rows]) for column in range(3))
    assert sum_weight_entropies(weights * factor, groups, seeds) == pytest.approx(tuple(expected), abs=1e-9)
