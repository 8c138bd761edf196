"""The pools of a curriculum: picks worked by hand, the shares of a batch, and how problems retire
and return."""

from collections import Counter
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ludic.errors import ConfigError
from ludic.training.rollouts.curriculum import DifficultyPools, Seen

SEEN = {
    0: Seen(3, (0.5, 1.0)),  # easy by its last mean
    1: Seen(1, (0.25,)),  # fit
    2: Seen(4, (1.0, 0.0)),  # hard, for the first time
    3: Seen(2, (0.0, 0.0)),  # retired until batch 2 + 20
    4: Seen(0, ()),  # fit: its group failed
    5: Seen(0, (0.0, 0.75)),  # fit
    6: Seen(1, (1.0,)),  # easy, picked before 0
}


def test_problems_are_sorted_by_their_last_means_and_then_by_their_last_picks() -> None:
    pools = DifficultyPools(10, seed=0)
    assert pools.sort(SEEN, 5) == {"easy": [6, 0], "fit": [4, 5, 1], "hard": [2], "retired": [3]}
    assert pools.sort(SEEN, 22) == {"easy": [6, 0], "fit": [4, 5, 1], "hard": [3, 2], "retired": []}


def test_a_batch_takes_the_parts_of_its_pools_and_fills_what_a_pool_lacks() -> None:
    """7 problems were seen, so none is new. Of 4 picks a quarter is easy, a half fit, a quarter
    hard; of 8 the hard pool has 1 of 2, and the others are filled from fit and then retired."""
    pools = DifficultyPools(7, seed=0, shares={"easy": 1, "fit": 2, "hard": 1})
    assert pools.pick(SEEN, 4, 5, Random(0)) == [6, 4, 5, 2]
    assert pools.pick(SEEN, 7, 5, Random(0))[-1] == 3
    assert sorted(pools.pick(SEEN, 7, 5, Random(0))) == list(range(7))
    assert Counter(pools.pick(SEEN, 8, 5, Random(0))) == Counter([*range(7), 6])


def test_new_problems_come_before_those_that_fit() -> None:
    pools = DifficultyPools(9, seed=0, shares={"easy": 0, "fit": 1, "hard": 0})
    assert set(pools.pick(SEEN, 2, 5, Random(0))) == {7, 8}
    assert pools.pick(SEEN, 4, 5, Random(0))[2:] == [4, 5]
    measured = pools.measure(SEEN, [7, 4, 5, 1], 5)
    assert measured == {
        "easy": 2,
        "fit": 3,
        "hard": 1,
        "retired": 1,
        "unseen": 2,
        "picked_easy": 0,
        "picked_fit": 0.75,
        "picked_hard": 0,
        "picked_retired": 0,
        "picked_unseen": 0.25,
    }


sizes = st.integers(0, 5)


@given(st.integers(1, 12), st.tuples(sizes, sizes, sizes).filter(any), st.integers(0, 2**32))
def test_each_pool_has_its_share_of_a_batch_rounded_up_or_down(count: int, shares: tuple[int, int, int], seed: int) -> None:
    names = ("easy", "fit", "hard")
    pools = DifficultyPools(36, seed=0, shares=dict(zip(names, shares, strict=True)), retire_after=None)
    seen = {problem: Seen(problem, (1 - problem // 12 / 2,)) for problem in range(36)}  # 12 easy, 12 fit, 12 hard
    picks = pools.pick(seen, count, 40, Random(seed))
    assert len(set(picks)) == count
    for number, share in enumerate(shares):
        assert abs(sum(pick // 12 == number for pick in picks) - count * share / sum(shares)) < 1


def test_the_mean_part_of_a_pool_is_its_share() -> None:
    """A tenth of 4 is 0.4: in 1000 batches 400 picks, with a standard deviation of 15."""
    pools = DifficultyPools(40, seed=0, retire_after=None)
    seen = {problem: Seen(0, (0.0 if problem < 20 else 0.5,)) for problem in range(40)}
    hard = sum(pick < 20 for batch in range(1000) for pick in pools.pick(seen, 4, 1, Random(batch)))
    assert 340 < hard < 460


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(1, 30),
    st.integers(0, 60),
)
def test_a_problem_is_retired_and_returns_by_the_rule(means: list[float], after: int, readmit: int, step: int) -> None:
    pools = DifficultyPools(1, seed=0, retire_after=after, readmit_after=readmit)
    streak = len(means) >= after and set(means[-after:]) in ({0.0}, {1.0})
    found = next(name for name, problems in pools.sort({0: Seen(10, tuple(means))}, step).items() if problems)
    kind = {0.0: "hard", 0.5: "fit", 1.0: "easy"}[means[-1]]
    assert found == ("retired" if streak and step < 10 + readmit else kind)


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        ({"shares": {"eazy": 0.5}}, r"curriculum.args.shares \(eazy\) must be easy, fit or hard.*easy\?"),
        ({"shares": {"hard": -1}}, r"curriculum.args.shares.hard \(-1\) must be at least 0"),
        ({"shares": dict.fromkeys(("easy", "fit", "hard"), 0)}, r"curriculum.args.shares \(0\) must be above 0"),
        ({"easy": 0.5, "hard": 0.5}, r"curriculum.args.easy \(0.5\) must be above 0.5"),
        ({"retire_after": 0}, r"curriculum.args.retire_after \(0\) must be .*1"),
        ({"readmit_after": 0.5}, r"curriculum.args.readmit_after \(0.5\) must be"),
    ],
)
def test_wrong_values_are_refused_with_the_rule(args: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        DifficultyPools(10, 0, **args)
