"""The planners compared with plain Python, and the inputs that they refuse."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import planning_oracle as oracle
import pytest
from hypothesis import given, settings, strategies as st
from planning_oracle import int32, overheads, workloads

from ludic import _core
from ludic.errors import BudgetError, ConfigError, DataError, DataTypeError

PLANNERS = [_core.plan_greedy, _core.plan_optimal, _core.plan_padding_free]
Planner = Callable[..., _core.Plan]


def check(plan: _core.Plan, lengths: list[int]) -> None:
    """Check that every index occurs once, that no micro-batch is empty, and that the views of the
    plan agree."""
    lists = plan.to_lists()
    assert sorted(index for rows in lists for index in rows) == list(range(len(lengths)))
    assert all(lists)
    assert [rows.tolist() for rows in plan] == lists
    assert len(plan) == len(lists)
    assert plan.indices.tolist() == [index for rows in lists for index in rows]
    assert np.diff(plan.offsets).tolist() == [len(rows) for rows in lists]
    assert plan.num_tokens == sum(lengths)


@given(workloads())
def test_greedy_equals_the_documented_algorithm_including_ties(workload: tuple[list[int], int]) -> None:
    lengths, budget = workload
    plan = _core.plan_greedy(int32(lengths), budget)
    assert plan.to_lists() == oracle.greedy(lengths, budget)
    assert plan.padded_tokens == oracle.cost(lengths, plan.to_lists(), 0)
    check(plan, lengths)


def test_the_documented_example_has_two_micro_batches() -> None:
    # 3 * 200 = 600 <= 1024 < 4 * 300 = 1200; 2 * 400 = 800 <= 1024.
    plan = _core.plan_greedy(int32([100, 150, 200, 300, 400]), 1024)
    assert plan.to_lists() == [[0, 1, 2], [3, 4]]
    assert (plan.num_tokens, plan.padded_tokens) == (1150, 1400)


@given(workloads(), overheads)
def test_optimal_equals_the_quadratic_dynamic_programme(workload: tuple[list[int], int], overhead: int) -> None:
    lengths, budget = workload
    plan = _core.plan_optimal(int32(lengths), budget, overhead)
    assert plan.to_lists() == oracle.optimal(lengths, budget, overhead)
    assert plan.padded_tokens == oracle.cost(lengths, plan.to_lists(), 0)
    check(plan, lengths)


@settings(max_examples=5)
@given(workloads(most=400), overheads)
def test_optimal_is_exact_for_400_samples(workload: tuple[list[int], int], overhead: int) -> None:
    lengths, budget = workload
    plan = _core.plan_optimal(int32(lengths), budget, overhead)
    assert plan.to_lists() == oracle.optimal(lengths, budget, overhead)


@settings(max_examples=20)
@given(workloads(most=10), overheads)
def test_optimal_equals_the_best_contiguous_partition(workload: tuple[list[int], int], overhead: int) -> None:
    lengths, budget = workload
    plan = _core.plan_optimal(int32(lengths), budget, overhead).to_lists()
    best = oracle.cheapest(lengths, budget, overhead, oracle.contiguous_partitions(lengths))
    assert oracle.cost(lengths, plan, overhead) == best


@settings(max_examples=20)
@given(workloads(most=7), overheads)
def test_optimal_equals_the_best_of_all_set_partitions(workload: tuple[list[int], int], overhead: int) -> None:
    lengths, budget = workload
    plan = _core.plan_optimal(int32(lengths), budget, overhead).to_lists()
    best = oracle.cheapest(lengths, budget, overhead, oracle.set_partitions(len(lengths)))
    assert oracle.cost(lengths, plan, overhead) == best


@given(workloads(most=200), overheads)
def test_optimal_is_never_worse_than_greedy(workload: tuple[list[int], int], overhead: int) -> None:
    lengths, budget = workload
    best = _core.plan_optimal(int32(lengths), budget, overhead).to_lists()
    greedy = _core.plan_greedy(int32(lengths), budget).to_lists()
    assert oracle.cost(lengths, best, overhead) <= oracle.cost(lengths, greedy, overhead)


@given(workloads(most=10))
def test_a_huge_overhead_minimises_micro_batches_first_and_tokens_second(workload: tuple[list[int], int]) -> None:
    lengths, budget = workload
    plan = _core.plan_optimal(int32(lengths), budget, 10**30)
    partitions = (
        (len(lists), oracle.cost(lengths, lists, 0))
        for lists in oracle.contiguous_partitions(lengths)
        if all(oracle.padded(lengths, rows) <= budget for rows in lists)
    )
    assert (len(plan), plan.padded_tokens) == min(partitions)
    assert len(plan) == len(_core.plan_greedy(int32(lengths), budget))


@given(workloads())
def test_padding_free_equals_best_fit_decreasing_or_has_fewer_micro_batches(workload: tuple[list[int], int]) -> None:
    lengths, budget = workload
    plan = _core.plan_padding_free(int32(lengths), budget)
    best_fit = oracle.best_fit_decreasing(lengths, budget)
    assert -(-sum(lengths) // budget) <= len(plan) <= len(best_fit)
    if len(plan) == len(best_fit):
        assert plan.to_lists() == best_fit
    assert all(sum(lengths[row] for row in rows) <= budget for rows in plan.to_lists())
    assert plan.padded_tokens == plan.num_tokens
    check(plan, lengths)


@pytest.mark.parametrize("samples", [1000, 10_000])
@pytest.mark.parametrize("budget", [16384, 32768])
def test_padding_free_uses_the_minimum_number_of_micro_batches(samples: int, budget: int) -> None:
    for seed in range(100 if samples == 1000 else 10):  # best fit alone has one more for 14 and 58
        lengths = oracle.w1(samples, seed)
        assert len(_core.plan_padding_free(lengths, budget)) == -(-int(lengths.sum()) // budget)


@pytest.mark.parametrize(("samples", "least_saving"), [(32, 0.26), (128, 0.11)])
def test_optimal_has_less_padding_than_greedy_on_small_batches(samples: int, least_saving: float) -> None:
    savings = []
    for seed in range(50):
        lengths = oracle.w1(samples, seed)
        greedy, best = _core.plan_greedy(lengths, 16384), _core.plan_optimal(lengths, 16384, 256)
        costs = [plan.padded_tokens + 256 * len(plan) for plan in (greedy, best)]
        savings.append(1 - costs[1] / costs[0])
    assert np.mean(savings) >= least_saving


@given(workloads(), st.randoms())
@pytest.mark.parametrize("planner", PLANNERS)
def test_the_order_of_the_samples_changes_only_their_indices(planner: Planner, workload, random) -> None:
    lengths, budget = workload
    shuffled = random.sample(lengths, len(lengths))

    def shape(lengths: list[int]) -> list[list[int]]:
        return [[lengths[row] for row in rows] for rows in planner(int32(lengths), budget).to_lists()]

    assert shape(lengths) == shape(shuffled)


@pytest.mark.parametrize("planner", PLANNERS)
def test_concurrent_threads_get_the_same_plan(planner: Planner) -> None:
    lengths = oracle.w1(20_000, seed=0)
    with ThreadPoolExecutor(4) as pool:
        plans = [future.result() for future in [pool.submit(planner, lengths, 16384) for _ in range(8)]]
    assert all(np.array_equal(plan.indices, plans[0].indices) for plan in plans)
    assert all(np.array_equal(plan.offsets, plans[0].offsets) for plan in plans)


@pytest.mark.parametrize("planner", PLANNERS)
def test_no_samples_give_no_micro_batches(planner: Planner) -> None:
    plan = planner(int32([]), 1)
    assert (len(plan), plan.to_lists(), plan.offsets.tolist(), plan.padded_tokens) == (0, [], [0], 0)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_micro_batch_can_be_indexed_from_either_end(planner: Planner) -> None:
    plan = planner(int32([4, 4, 4]), 4)
    assert plan[-1].tolist() == plan[2].tolist() == plan.to_lists()[2]
    assert plan[0].dtype == np.int64
    for index in (3, -4, 2**62):
        with pytest.raises(IndexError, match="of 3"):
            plan[index]


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_strided_view_gives_the_same_plan_as_its_copy(planner: Planner) -> None:
    lengths = oracle.w1(500, seed=1)
    assert planner(lengths[::-2], 9000).to_lists() == planner(lengths[::-2].copy(), 9000).to_lists()


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("budget", [6, 1, 0, -1, -(10**30)])
def test_a_budget_below_the_longest_sample_is_refused(planner: Planner, budget: int) -> None:
    with pytest.raises(BudgetError, match=r"micro_token_budget \(-?\d+\) must be"):
        planner(int32([3, 7]), budget)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_error_of_a_negative_length_names_its_index(planner: Planner) -> None:
    with pytest.raises(DataError, match=r"sample 2 \(-5\) must not be negative"):
        planner(int32([3, 7, -5, -6]), 100)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    "lengths", [[1, 2], np.array([1, 2]), np.array([1.0]), np.ones((2, 2), np.int32), np.array([None]), None, "12"]
)
def test_lengths_of_a_wrong_type_are_refused(planner: Planner, lengths: object) -> None:
    with pytest.raises(DataTypeError, match="one-dimensional int32 array"):
        planner(lengths, 100)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("budget", [1024.0, "1024", None])
def test_a_budget_that_is_not_an_integer_is_a_type_error(planner: Planner, budget: object) -> None:
    with pytest.raises(TypeError, match="micro_token_budget"):
        planner(int32([1]), budget)


def test_a_negative_overhead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overhead_tokens \(-1\) must not be negative"):
        _core.plan_optimal(int32([1]), 4, -1)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_largest_lengths_do_not_overflow(planner: Planner) -> None:
    lengths = np.full(1000, oracle.LONGEST, np.int32)
    plan = planner(lengths, 2**200)
    assert plan.num_tokens == 1000 * oracle.LONGEST
    assert plan.padded_tokens == plan.num_tokens
    check(planner(lengths, 2 * oracle.LONGEST), lengths.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
def test_ten_million_samples_take_less_than_a_second(planner: Planner) -> None:
    lengths = oracle.w1(10**7, seed=0)
    seconds, plan = oracle.least_seconds(lambda: planner(lengths, 16384))
    assert seconds < 1
    assert np.array_equal(np.sort(plan.indices), np.arange(10**7))
    ends = np.add.reduceat(lengths[plan.indices], plan.offsets[:-1].astype(np.intp))
    if planner is not _core.plan_padding_free:
        ends = np.maximum.reduceat(lengths[plan.indices], plan.offsets[:-1]) * np.diff(plan.offsets)
    assert ends.max() <= 16384


@given(workloads())
def test_items_are_split_according_to_the_plan(workload: tuple[list[int], int]) -> None:
    lengths, budget = workload
    items = [f"sample {index}" for index in range(len(lengths))]
    plan = _core.plan_greedy(int32(lengths), budget)
    assert plan.split(items) == [[items[index] for index in rows] for rows in plan.to_lists()]


@pytest.mark.parametrize("surplus", [-1, 1])
def test_the_number_of_items_must_equal_the_number_of_planned_samples(surplus: int) -> None:
    with pytest.raises(DataError, match=r"items \(\d\) .*samples \(3\) .*equally long"):
        _core.plan_greedy(int32([1, 2, 3]), 9).split(["item"] * (3 + surplus))


def test_lengths_are_read_from_the_sequences() -> None:
    assert _core.lengths_of([[1, 2], (), "abc", np.zeros(4)]).tolist() == [2, 0, 3, 4]
    assert _core.lengths_of([]).dtype == np.int32
    with pytest.raises(DataError, match="exceeds 2"):
        _core.lengths_of([range(2**31)])
    with pytest.raises(DataTypeError, match=r"sequences\[1\] .*has no len"):
        _core.lengths_of([[1], 3])
    assert _core.lengths_of(([1, 2], [3])).tolist() == [2, 1]


def test_the_error_of_an_invalid_index_says_so() -> None:
    lengths = int32([4, 4, 4])
    for plan in (_core.plan_greedy(lengths, 4), _core.plan_ranks(lengths, 4, 1)[0]):
        for index in (slice(0, 2), "0", 1.0, None):
            with pytest.raises(DataTypeError, match=r"micro-batch index .*list\(plan\)"):
                plan[index]  # type: ignore[index]
        for huge in (2**70, -(2**70)):
            with pytest.raises(IndexError, match=f"micro-batch index {huge} is out of range"):
                plan[huge]


@pytest.mark.parametrize("value", ["chosen", 3, None, {"a": 1}, np.zeros(3)])
def test_objects_that_are_not_lists_are_refused(value: Any) -> None:
    with pytest.raises(DataTypeError, match=r"items is a \w+, .*a list"):
        _core.plan_greedy(int32([1, 2, 3]), 9).split(value)
    with pytest.raises(DataTypeError, match=r"sequences is a \w+, .*a list"):
        _core.lengths_of(value)
