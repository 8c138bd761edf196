"""Preference pairs are grouped by id and never split by a plan."""

from typing import Any

import numpy as np
import planning_oracle as oracle
import pytest
from hypothesis import given, strategies as st
from planning_oracle import int32, overheads, workloads

from ludic import _core
from ludic.errors import BudgetError, ConfigError, DataError, DataTypeError


@given(workloads(most=80), st.none() | overheads, st.randoms())
def test_a_pair_is_never_split(workload: tuple[list[int], int], overhead: int | None, random) -> None:
    lengths, budget = workload
    samples = random.sample(range(len(lengths)), len(lengths) // 2 * 2)
    pairs = np.array(samples, np.int64).reshape(-1, 2)
    plan = _core.plan_pairs(int32(lengths), pairs, 2 * budget, overhead)
    planned = [tuple(rows[k : k + 2]) for rows in plan.to_lists() for k in range(0, len(rows), 2)]
    assert sorted(planned) == sorted(map(tuple, pairs.tolist()))
    assert all(oracle.padded(lengths, rows) <= 2 * budget for rows in plan.to_lists())
    assert plan.padded_tokens == oracle.cost(lengths, plan.to_lists(), 0)


@given(workloads(most=60), st.none() | overheads)
def test_pairs_are_planned_as_units_of_two_rows(workload: tuple[list[int], int], overhead: int | None) -> None:
    lengths, budget = workload
    count = len(lengths) // 2
    pairs = np.arange(2 * count, dtype=np.int64).reshape(-1, 2)
    atoms = [max(lengths[2 * k], lengths[2 * k + 1]) for k in range(count)]
    # A pair has two rows and costs 2 * length, which equals planning doubled lengths with the whole
    # budget.
    doubled = [2 * length for length in atoms]
    if overhead is None:
        expected = oracle.greedy(doubled, 2 * budget)
    else:
        expected = oracle.optimal(doubled, 2 * budget, overhead)
    plan = _core.plan_pairs(int32(lengths), pairs, 2 * budget, overhead).to_lists()
    assert plan == [[row for k in atoms for row in (2 * k, 2 * k + 1)] for atoms in expected]


def test_the_documented_example_has_two_micro_batches() -> None:
    # Pair lengths 5, 3, 6. Ascending 3, 5, 6: 2 * 5 * 2 = 20 <= 20, 2 * 6 * 3 = 36 > 20.
    pairs = np.arange(6).reshape(3, 2)
    assert _core.plan_pairs(int32([5, 4, 3, 2, 6, 6]), pairs, 20).to_lists() == [[2, 3, 0, 1], [4, 5]]


def test_a_budget_for_one_row_is_too_small_for_a_pair() -> None:
    with pytest.raises(BudgetError, match=r"micro_token_budget \(9\) .*longest pair \(5\)"):
        _core.plan_pairs(int32([5, 4]), np.array([[0, 1]]), 9)
    assert len(_core.plan_pairs(int32([5, 4]), np.array([[0, 1]]), 10)) == 1


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 3]], r"sample 3, .*3 samples"),
        ([[-1, 0]], "names sample -1"),
        ([[0, 1], [1, 2]], "pair 1 names sample 1 again"),
        ([[0, 0]], "pair 0 names sample 0 again"),
        ([[0, 2]], r"sample 2 \(-3\) must not be negative"),
    ],
)
def test_invalid_pairs_are_refused(pairs: list[list[int]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _core.plan_pairs(int32([5, 4, -3]), np.array(pairs), 99)


@pytest.mark.parametrize("pairs", [[[0, 1]], np.zeros((1, 3), np.int64), np.zeros(2, np.int64), np.zeros((1, 2)), None])
def test_pairs_of_a_wrong_type_are_refused(pairs: object) -> None:
    with pytest.raises(DataTypeError, match=r"int64 array \[P, 2\]"):
        _core.plan_pairs(int32([5, 4]), pairs, 99)  # type: ignore[arg-type]


def test_no_pairs_give_no_micro_batches() -> None:
    assert _core.plan_pairs(int32([5, 4]), np.empty((0, 2), np.int64), 1).to_lists() == []


def test_a_negative_overhead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overhead_tokens \(-1\)"):
        _core.plan_pairs(int32([5, 4]), np.array([[0, 1]]), 99, -1)


ids = st.one_of(st.integers(-3, 3), st.sampled_from(["a", "b", "", "1", "é\N{SNOWMAN}"]))


@given(st.dictionaries(ids, st.sampled_from(["both", "chosen", "rejected"]), max_size=8), st.randoms())
def test_groups_are_in_order_of_first_appearance(halves: dict[str | int, str], random) -> None:
    samples = [(pair_id, role) for pair_id, which in halves.items() for role in ("chosen", "rejected") if which in (role, "both")]
    random.shuffle(samples)
    order = list(dict.fromkeys(pair_id for pair_id, _ in samples))
    complete = [pair_id for pair_id in order if halves[pair_id] == "both"]
    pairs, incomplete = _core.group_pairs([sample[0] for sample in samples], [sample[1] for sample in samples])
    assert pairs.shape == (len(complete), 2)
    assert pairs.dtype == np.int64
    expected = [[samples.index((pair_id, "chosen")), samples.index((pair_id, "rejected"))] for pair_id in complete]
    assert pairs.tolist() == expected
    assert incomplete == [pair_id for pair_id in order if halves[pair_id] != "both"]


def test_the_id_1_and_the_id_text_1_are_different_pairs() -> None:
    pairs, incomplete = _core.group_pairs([1, "1", "1", np.int64(1)], ["chosen", "rejected", "chosen", "rejected"])
    assert pairs.tolist() == [[0, 3], [2, 1]]
    assert incomplete == []


def test_an_incomplete_pair_is_an_error_when_it_may_not_be_dropped() -> None:
    assert _core.group_pairs(["a"], ["chosen"])[1] == ["a"]
    with pytest.raises(DataError, match=r'pair "a".* only its chosen sample'):
        _core.group_pairs(["a"], ["chosen"], drop_incomplete=False)


@pytest.mark.parametrize(
    ("pair_ids", "roles", "error", "message"),
    [
        (["a", "a"], ["chosen", "chosen"], DataError, r"two chosen samples \(0 and 1\)"),
        (["a"], ["best"], DataError, r'sample 0 \("best"\) .*"chosen" or "rejected"'),
        (["a", "b"], ["chosen"], DataError, r"pair_ids \(2\) and roles \(1\) .*equally long"),
        ([1.5], ["chosen"], DataTypeError, r"pair_id must be .*string .*integer, not 1\.5"),
        ([2**70], ["chosen"], DataTypeError, "not 1180591620717411303424"),
        ([None], ["chosen"], DataTypeError, "not None"),
        (["a"], [0], DataTypeError, "role must be a string, not 0"),
        (["\ud800"], ["chosen"], DataTypeError, r"not '\\ud800', which has no UTF-8 encoding"),
        (["a"], ["\ud800"], DataTypeError, r"role must be a string, not '\\ud800'"),
        ([True, 1], ["chosen", "rejected"], DataTypeError, "not the bool True"),
        (["a"], "chosen", DataTypeError, "roles is 'chosen', .*a sequence"),
        ("a", ["chosen"], DataTypeError, "pair_ids is 'a', but must be"),
        (b"a", ["chosen"], DataTypeError, "pair_ids is b'a', but must be"),
        (3, ["chosen"], DataTypeError, "pair_ids is 3, but must be"),
        ({"a"}, ["chosen"], DataTypeError, "pair_ids is {'a'}, but must be"),
        (["a"], None, DataTypeError, "roles is None, but must be"),
    ],
)
def test_invalid_ids_and_roles_are_refused(pair_ids: Any, roles: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _core.group_pairs(pair_ids, roles)


def test_ids_and_roles_can_be_any_sequences() -> None:
    ids: list[Any] = [(7, 7), np.array([7, 7]), np.array(["a", "a"]), memoryview(b"aa")]
    for some in ids:
        pairs, incomplete = _core.group_pairs(some, ("chosen", "rejected"))
        assert (pairs.tolist(), incomplete) == ([[0, 1]], [])
    assert _core.group_pairs(range(7, 9), np.array(["chosen", "chosen"]))[1] == [7, 8]  # type: ignore[arg-type]


class Interrupted:
    """Raises when converted to text or to a number."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __index__(self) -> int:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_error_raised_by_an_id_is_unchanged(error: type[BaseException]) -> None:
    with pytest.raises(error):
        _core.group_pairs([Interrupted(error)], ["chosen"])  # type: ignore[list-item]


def test_a_python_conversion_error_is_the_cause_of_ours() -> None:
    with pytest.raises(DataTypeError) as caught:
        _core.group_pairs([1.5], ["chosen"])  # type: ignore[list-item]
    assert isinstance(caught.value.__cause__, TypeError)
