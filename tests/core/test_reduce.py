"""Reducers compared with plain Python on nested dictionaries."""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic import _core
from ludic.errors import ConfigError, DataError, DataTypeError, LudicError

numbers = st.integers(-1000, 1000) | st.floats(-1e6, 1e6) | st.booleans() | st.none()
records = st.lists(
    st.fixed_dictionaries(
        {}, optional={"a": numbers, "b": st.fixed_dictionaries({}, optional={"a": numbers, "c": numbers}) | numbers}
    ),
    max_size=30,
)
kinds = st.sampled_from(["mean", "sum", "count_true"])
paths = st.sampled_from(["a", "b", "b.a", "b.c", "b.c.d", "absent"])
denominators = st.sampled_from([None, "samples", "rollouts"])


def lookup(record: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(record, Mapping) or key not in record:
            return None
        record = record[key]
    return record


def plain(records: list[Any], kind: str, path: str, denominator: int | None) -> float:
    values = [value for value in (lookup(record, path) for record in records) if value is not None]
    total = math.fsum(bool(value) if kind == "count_true" else value for value in values)
    by = denominator if denominator is not None else len(values) if kind == "mean" else 1
    return total / by if by else 0.0


@given(records, st.lists(st.tuples(kinds, paths, denominators), max_size=5), st.integers(0, 40), st.integers(0, 40))
def test_reducers_equal_plain_python(
    records: list[Any], reducers: list[tuple[str, str, str | None]], num_samples: int, num_rollouts: int
) -> None:
    count = {None: None, "samples": num_samples, "rollouts": num_rollouts}
    # A mapping is truthy but not a number.
    reducers = [reducer for reducer in reducers if reducer[0] == "count_true" or reducer[1] != "b"]
    got = _core.reduce_records(records, reducers, num_samples, num_rollouts)
    want = [plain(records, kind, path, count[by]) for kind, path, by in reducers]
    assert got == pytest.approx(want, rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(-1e6, 1e6)), kinds)
def test_a_column_equals_plain_python(values: list[float], kind: str) -> None:
    column = np.array(values, np.float64)
    want = plain([{"a": value} for value in values], kind, "a", None)
    assert _core.reduce_column(kind, column) == pytest.approx(want, rel=1e-9, abs=1e-6)
    assert _core.reduce_column(kind, np.repeat(column, 2)[::2]) == _core.reduce_column(kind, column)


def test_a_mean_with_a_denominator_is_divided_once() -> None:
    records = [{"reward": 1}, {"reward": 3}, {}, {"reward": None}]
    # (1 + 3) / 2 present; (1 + 3) / 4 samples, not 2 / 4.
    reducers = [("mean", "reward", None), ("mean", "reward", "samples")]
    assert _core.reduce_records(records, reducers, 4, 2) == [2.0, 1.0]


def test_a_denominator_of_zero_gives_zero() -> None:
    reducers = [(kind, "a", by) for kind in ("mean", "sum", "count_true") for by in ("samples", "rollouts")]
    assert _core.reduce_records([{"a": 5}], reducers, 0, 0) == [0.0] * 6


def test_a_rate_by_rollouts_counts_a_rollout_once() -> None:
    steps = [
        {"rollout_id": "r0", "truncated": False},
        {"rollout_id": "r0", "truncated": True},
        {"rollout_id": "r0", "truncated": True},
        {"rollout_id": "r1", "truncated": False},
    ]
    by_rollouts, by_samples = ("count_true", "truncated", "rollouts"), ("count_true", "truncated", "samples")
    assert _core.reduce_records(steps, [by_rollouts, by_samples], 4, 2) == [0.5, 0.5]


def test_any_mapping_and_any_truth_value_are_accepted() -> None:
    records = [MappingProxyType({"a": {"b": "yes"}}), {"a": MappingProxyType({"b": []})}, {"a": {"b": np.True_}}]
    assert _core.reduce_records(records, [("count_true", "a.b", None)], 3, 3) == [2.0]
    assert _core.reduce_records([{"a": np.float32(1.5)}, {"a": np.int64(2)}], [("sum", "a", None)], 2, 2) == [3.5]


class Broken(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("broken")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_an_error_raised_by_a_mapping_is_not_swallowed() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        _core.reduce_records([Broken()], [("sum", "a", None)], 1, 1)


def test_the_error_of_a_value_that_is_not_a_number_names_it() -> None:
    with pytest.raises(DataTypeError, match=r"record 1: env\.name is 'maze'"):
        _core.reduce_records([{}, {"env": {"name": "maze"}}], [("mean", "env.name", None)], 2, 2)
    with pytest.raises(DataError, match=r"record 0: a is 1000.* float64"):
        _core.reduce_records([{"a": 10**400}], [("sum", "a", None)], 1, 1)


def test_an_unknown_kind_or_denominator_is_refused() -> None:
    with pytest.raises(ConfigError, match='"median"; use mean, sum or count_true'):
        _core.reduce_records([], [("median", "a", None)], 0, 0)
    with pytest.raises(ConfigError, match="median"):
        _core.reduce_column("median", np.zeros(1))
    with pytest.raises(ConfigError, match='"steps"; use None, samples or rollouts'):
        _core.reduce_records([], [("sum", "a", "steps")], 0, 0)
    with pytest.raises(ConfigError, match="num_rollouts"):
        _core.reduce_records([], [], 0, -1)


@pytest.mark.parametrize("values", [[1.0], np.zeros(3, np.float32), np.zeros((2, 2)), None])
def test_a_column_of_a_wrong_type_is_refused(values: Any) -> None:
    with pytest.raises(DataTypeError, match="one-dimensional float64 array"):
        _core.reduce_column("sum", values)


finite_or_not = st.floats(-1e16, 1e16) | st.sampled_from([math.nan, math.inf, -math.inf, 1e16, -1e16, 1.0])


@given(st.lists(finite_or_not), kinds)
def test_a_column_and_records_give_the_same_result(values: list[float], kind: str) -> None:
    records = [{"a": value} for value in values]
    want = _core.reduce_records(records, [(kind, "a", None)], 1, 1)[0]
    assert _core.reduce_column(kind, np.array(values, np.float64)) == pytest.approx(want, rel=1e-15, abs=1e-12, nan_ok=True)


def test_a_sum_keeps_small_terms() -> None:
    # 1e16 + 1 rounds to 1e16, so that a plain sum of these is 0.
    values = [1e16, *[1.0] * 1000, -1e16]
    assert _core.reduce_records([{"a": value} for value in values], [("sum", "a", None)], 1, 1) == [1000.0]
    assert _core.reduce_column("sum", np.array(values)) == 1000.0


def test_nan_propagates_to_the_result() -> None:
    mean, true = ("mean", "a", None), ("count_true", "a", None)
    reduced = _core.reduce_records([{"a": 1.0}, {"a": math.nan}], [mean, true], 2, 2)
    assert math.isnan(reduced[0])
    assert reduced[1] == 2
    assert math.isnan(_core.reduce_column("mean", np.array([1.0, math.nan])))
    assert _core.reduce_column("count_true", np.array([1.0, math.nan])) == 2


def test_the_error_of_an_unhashable_rollout_id_names_it() -> None:
    records = [{"rollout_id": "r0", "hit": True}, {"rollout_id": ["r1"], "hit": True}]
    with pytest.raises(DataTypeError, match=r"record 1: rollout_id is \['r1'\], .*hashable") as caught:
        _core.reduce_records(records, [("count_true", "hit", "rollouts")], 2, 2)
    assert isinstance(caught.value.__cause__, TypeError)


def test_the_error_of_a_value_without_a_truth_value_names_it() -> None:
    with pytest.raises(DataTypeError, match=r"record 0: hits is array\(\[1, 0\]\), .*count_true") as caught:
        _core.reduce_records([{"hits": np.array([1, 0])}], [("count_true", "hits", None)], 1, 1)
    assert isinstance(caught.value.__cause__, ValueError)


def test_records_that_are_not_iterable_are_refused() -> None:
    with pytest.raises(DataTypeError, match=r"records is a int, .*sequence of mappings"):
        _core.reduce_records(3, [], 1, 1)  # type: ignore[arg-type]


class Interrupted:
    """Raises when converted to a number or a truth value."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error

    def __bool__(self) -> bool:
        raise self.error

    def __hash__(self) -> int:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_error_raised_by_a_value_is_unchanged(error: type[BaseException]) -> None:
    record = {"a": Interrupted(error), "b": True, "rollout_id": Interrupted(error)}
    for reducer in [("sum", "a", None), ("count_true", "a", None), ("count_true", "b", "rollouts")]:
        with pytest.raises(error) as caught:
            _core.reduce_records([record], [reducer], 1, 1)
        assert not isinstance(caught.value, LudicError)
