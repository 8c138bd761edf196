"""Plans for several ranks: equal numbers of micro-batches, balanced work, and no idle rank."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import planning_oracle as oracle
import pytest
from hypothesis import given, strategies as st
from planning_oracle import int32, overheads, workloads

from ludic import _core
from ludic.errors import BudgetError, ConfigError, DataError, DataTypeError

PACKINGS = ["greedy", "optimal", "padding_free"]
Lists = list[list[int]]


def cost(length: int) -> int:
    return 24576 * length + length**2


def tokens(lengths: list[int], rows: list[int], packing: str) -> int:
    return sum(lengths[row] for row in rows) if packing == "padding_free" else oracle.padded(lengths, rows)


def work(lengths: list[int], rows: list[int], packing: str) -> int:
    """The work of a rank for one micro-batch, including padding."""
    if packing == "padding_free":
        return sum(cost(lengths[row]) for row in rows)
    return len(rows) * cost(max((lengths[row] for row in rows), default=0))


def lists(plans: list[_core.RankPlan]) -> list[Lists]:
    return [[rows.tolist() for rows in plan] for plan in plans]


def lockstep_efficiency(lengths: list[int], ranks: list[Lists], packing: str) -> float:
    """The work of the samples, divided by the work of ranks that wait for the slowest one at each
    step."""
    slowest = sum(max(work(lengths, rows, packing) for rows in step) for step in zip(*ranks, strict=True))
    return sum(map(cost, lengths)) / len(ranks) / slowest


@given(workloads(most=150), st.integers(1, 64), st.sampled_from(PACKINGS), overheads)
def test_all_ranks_take_the_same_number_of_steps_and_none_is_idle(
    workload: tuple[list[int], int], world_size: int, packing: str, overhead: int
) -> None:
    lengths, budget = workload
    plans = _core.plan_ranks(int32(lengths), budget, world_size, packing, overhead)
    ranks = lists(plans)
    assert len(plans) == world_size
    assert sorted(row for rank in ranks for rows in rank for row in rows) == list(range(len(lengths)))
    steps = len(plans[0])
    assert {len(plan) for plan in plans} == {steps}
    assert all(tokens(lengths, rows, packing) <= budget for rank in ranks for rows in rank)
    assert len(lengths) < world_size or all(any(rank) for rank in ranks)
    empty = sum(not rows for rank in ranks for rows in rank)
    assert empty == (max(0, steps * world_size - len(lengths)) if lengths else 0)
    for plan, rank in zip(plans, ranks, strict=True):
        assert plan.cost == sum(cost(lengths[row]) for rows in rank for row in rows)
        assert plan.padded_tokens == sum(tokens(lengths, rows, packing) for rows in rank)


@given(workloads(most=100), st.integers(1, 16))
def test_padded_plans_take_the_fewest_steps_when_a_step_is_expensive(workload: tuple[list[int], int], ranks: int) -> None:
    lengths, budget = workload
    fewest = -(-len(oracle.greedy(lengths, budget)) // ranks)
    for packing in ("greedy", "optimal"):
        assert len(_core.plan_ranks(int32(lengths), budget, ranks, packing, 10**30)[0]) == fewest


@pytest.mark.parametrize(
    ("packing", "samples", "least"),
    [
        ("optimal", 256, 0.77),
        ("optimal", 1024, 0.92),
        ("optimal", 4096, 0.975),
        ("padding_free", 256, 0.998),
        ("padding_free", 1000, 0.998),
    ],
)
def test_eight_ranks_are_well_balanced(packing: str, samples: int, least: float) -> None:
    efficiencies = []
    for seed in range(10):
        lengths = oracle.w1(samples, seed)
        ranks = lists(_core.plan_ranks(lengths, 16384, 8, packing))
        efficiencies.append(lockstep_efficiency(lengths.tolist(), ranks, packing))
    assert np.mean(efficiencies) >= least


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_heaviest_step_comes_first(packing: str) -> None:
    lengths = oracle.w1(1000, seed=3)
    ranks = lists(_core.plan_ranks(lengths, 16384, 8, packing))
    steps = [[work(lengths.tolist(), rows, packing) for rows in step] for step in zip(*ranks, strict=True)]
    assert all(min(earlier) >= max(later) for earlier, later in itertools.pairwise(steps))


@pytest.mark.parametrize("packing", PACKINGS)
def test_samples_that_fill_the_budget_are_single_rows(packing: str) -> None:
    # Ten samples that each fill a micro-batch on eight ranks: two steps with 16 places, and the 6
    # empty ones are in the last step.
    ranks = lists(_core.plan_ranks(int32([7] * 10), 7, 8, packing))
    assert all(len(rank) == 2 and len(rank[0]) == 1 for rank in ranks)
    assert sum(not rank[1] for rank in ranks) == 6


@pytest.mark.parametrize("packing", PACKINGS)
def test_with_fewer_samples_than_ranks_the_others_get_one_empty_row(packing: str) -> None:
    plans = _core.plan_ranks(int32([3, 5]), 8, 4, packing)
    assert sorted(lists(plans)) == [[[]], [[]], [[0]], [[1]]]
    assert sorted(plan.cost for plan in plans) == [0, 0, cost(3), cost(5)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_no_samples_give_no_micro_batches(packing: str) -> None:
    assert lists(_core.plan_ranks(int32([]), 8, 3, packing)) == [[], [], []]


@pytest.mark.parametrize("packing", PACKINGS)
def test_concurrent_threads_get_the_same_plan(packing: str) -> None:
    lengths = oracle.w1(5000, seed=0)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(_core.plan_ranks, lengths, 16384, 8, packing) for _ in range(8)]
        plans = [lists(future.result()) for future in futures]
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"world_size": 0}, ConfigError, r"world_size \(0\) must be from 1 to"),
        ({"world_size": 10**30}, ConfigError, "world_size"),
        ({"packing": "best"}, ConfigError, 'packing ."best". .*"greedy", "optimal" or "padding_free"'),
        ({"linear": -1}, ConfigError, r"linear \(-1\)"),
        ({"quadratic": 2**40}, ConfigError, "quadratic"),
        ({"overhead_tokens": -1}, ConfigError, "overhead_tokens"),
        ({"micro_token_budget": 6}, BudgetError, r"micro_token_budget \(6\)"),
        ({"lengths": int32([-1])}, DataError, r"sample 0 \(-1\)"),
        ({"lengths": [1]}, DataTypeError, "int32"),
    ],
)
@pytest.mark.parametrize("packing", PACKINGS)
def test_invalid_settings_are_refused(settings: dict[str, object], error: type[Exception], message: str, packing: str) -> None:
    valid = {"lengths": int32([7]), "micro_token_budget": 7, "world_size": 2, "packing": packing}
    with pytest.raises(error, match=message):
        _core.plan_ranks(**(valid | settings))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS)
def test_ten_million_samples_take_less_than_a_second(packing: str) -> None:
    lengths = oracle.w1(10**7, seed=0)
    seconds, plans = oracle.least_seconds(lambda: _core.plan_ranks(lengths, 16384, 8, packing))
    assert seconds < 1
    assert len({len(plan) for plan in plans}) == 1
