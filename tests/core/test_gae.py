"""Advantages compared with a slow sum in exact fractions."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic import _core
from ludic.errors import DataError, DataTypeError
from ludic.training.credit_assignment import MonteCarloReturn
from ludic.types import Rollout, Step

sixteenths = st.integers(-64, 64).map(lambda number: number / 16)
episodes = st.lists(st.tuples(st.lists(st.tuples(sixteenths, sixteenths), max_size=6), sixteenths), max_size=6)
shares = st.sampled_from([0.0, 0.25, 0.5, 1.0])


def packed(episodes: list[tuple[list[tuple[float, float]], float]], gamma: float, lam: float) -> Any:
    tokens = [token for turns, _ in episodes for token in turns]
    rewards, values = (np.array([token[column] for token in tokens], np.float64) for column in (0, 1))
    lengths = np.array([len(turns) for turns, _ in episodes], np.int64)
    return _core.gae(rewards, values, lengths, np.array([last for _, last in episodes], np.float64), gamma=gamma, lam=lam)


@given(episodes, shares, shares)
def test_advantages_are_the_discounted_sums_of_the_errors(episodes: Any, gamma: float, lam: float) -> None:
    got, returns = packed(episodes, gamma, lam)
    want, values = [], [value for turns, _ in episodes for _, value in turns]
    for turns, last in episodes:
        after = [*(value for _, value in turns), last][1:]
        errors = [
            Fraction(reward) + Fraction(gamma) * Fraction(then) - Fraction(value)
            for (reward, value), then in zip(turns, after, strict=True)
        ]
        want += [
            float(sum(Fraction(gamma * lam) ** late * error for late, error in enumerate(errors[token:])))
            for token in range(len(errors))
        ]
    assert got.tolist() == want  # sixteenths and powers of two: float64 rounds nothing
    assert returns.tolist() == [advantage + value for advantage, value in zip(want, values, strict=True)]


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), max_size=5), st.floats(0, 1))
def test_without_a_critic_and_with_lambda_1_they_are_the_returns_of_reinforce(rewards: list[list[float]], gamma: float) -> None:
    got, _ = packed([([(reward, 0.0) for reward in episode], 0.0) for episode in rewards], gamma, 1.0)
    want: list[Any] = []
    for episode in rewards:
        steps = [Step(index, "", "", None, reward, False, False) for index, reward in enumerate(episode)]
        want += [*MonteCarloReturn(gamma).compute([Rollout("r", steps)]).values()][::-1]
    assert got.tolist() == want


def test_an_episode_that_was_cut_off_goes_on_with_its_last_value() -> None:
    # cut off: deltas 1 + 0.5 * 2 - 0 = 2 and 0 + 0.5 * 4 - 2 = 0, A = [2 + 0.25 * 0, 0]
    # ended: the second delta is -2, A = [2 - 0.25 * 2, -2]
    cut, returns = packed([([(1.0, 0.0), (0.0, 2.0)], 4.0)], 0.5, 0.5)
    ended, _ = packed([([(1.0, 0.0), (0.0, 2.0)], 0.0)], 0.5, 0.5)
    assert (cut.tolist(), returns.tolist(), ended.tolist()) == ([2.0, 0.0], [2.0, 2.0], [1.5, -2.0])


def test_columns_that_do_not_fit_are_refused() -> None:
    two, one = np.zeros(2), np.ones(1, np.int64)
    with pytest.raises(DataError, match="rewards has length 2"):
        _core.gae(two, two, one, np.zeros(1), gamma=1.0, lam=1.0)
    with pytest.raises(DataTypeError, match=r"lengths must be .*int64 array"):
        _core.gae(two, two, np.ones(1), np.zeros(1), gamma=1.0, lam=1.0)
    assert _core.gae(np.zeros(4)[::2], two, np.array([2]), np.zeros(1), gamma=1.0, lam=1.0)[0].tolist() == [0.0, 0.0]
