"""What other threads can do while the core computes."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import planning_oracle as oracle
import pytest

from ludic import _core

Plan = Callable[[Any], object]

# Made in advance, because numpy also releases the GIL.
PAIRS = np.arange(1 << 19).reshape(-1, 2)

# For each planner, the number of samples from which it releases the GIL, and a smaller number that
# it plans while holding it.
PLANNERS: dict[str, tuple[Plan, int, int]] = {
    "greedy": (lambda lengths: _core.plan_greedy(lengths, 16384), 1 << 21, 1 << 10),
    "optimal": (lambda lengths: _core.plan_optimal(lengths, 16384), 1 << 19, 1 << 10),
    "padding-free": (lambda lengths: _core.plan_padding_free(lengths, 16384), 1 << 19, 1 << 10),
    "pairs": (lambda lengths: _core.plan_pairs(lengths, PAIRS[: len(lengths) // 2], 16384), 1 << 19, 1 << 10),
    "ranks, greedy": (lambda lengths: _core.plan_ranks(lengths, 16384, 8, "greedy"), 1 << 18, 1 << 10),
    "ranks, optimal": (lambda lengths: _core.plan_ranks(lengths, 16384, 8), 1 << 13, 1 << 5),
    "ranks, padding-free": (lambda lengths: _core.plan_ranks(lengths, 16384, 8, "padding_free"), 1 << 14, 1 << 10),
}


@pytest.fixture
def no_thread_is_interrupted() -> Iterator[None]:
    """Raises the switch interval, so that a waiting thread gets the GIL only when another thread
    releases it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def runs_beside(work: Callable[[], object]) -> bool:
    """Whether a thread that was ready to run did run before `work` ended."""
    ready, ran = threading.Event(), []

    def note() -> None:
        ready.wait()
        ran.append(True)

    thread = threading.Thread(target=note)
    thread.start()
    ready.set()
    work()
    has_run = bool(ran)
    thread.join()
    return has_run


def runs_beside_in_time(work: Callable[[], object], deadline_s: float = 60) -> bool:
    """Whether a thread ran beside `work` in one of as many calls as `deadline_s` allows: `work`
    takes milliseconds, and a busy machine may wake the thread after each of many calls."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if runs_beside(work):
            return True
    return False


@pytest.mark.usefixtures("no_thread_is_interrupted")
@pytest.mark.parametrize("planner", PLANNERS)
def test_other_threads_run_while_a_large_plan_is_computed(planner: str) -> None:
    plan, large, _ = PLANNERS[planner]
    lengths = oracle.w1(large, seed=0)
    assert runs_beside_in_time(lambda: plan(lengths))


@pytest.mark.usefixtures("no_thread_is_interrupted")
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_small_plan_does_not_release_the_gil(planner: str) -> None:
    plan, _, small = PLANNERS[planner]
    lengths = oracle.w1(small, seed=0)
    assert not any(runs_beside(lambda: plan(lengths)) for _ in range(20))


def table_of(tokens: int) -> _core.SampleTable:
    return _core.SampleTable.from_columns(np.ones(tokens, np.int32), np.ones(tokens, np.uint8), [0, tokens])


@pytest.mark.usefixtures("no_thread_is_interrupted")
def test_other_threads_run_while_a_large_table_is_written_and_read_as_bytes() -> None:
    table = table_of(1 << 21)
    data = table.to_bytes()
    assert runs_beside_in_time(table.to_bytes)
    assert runs_beside_in_time(lambda: _core.SampleTable.from_bytes(data))


@pytest.mark.usefixtures("no_thread_is_interrupted")
def test_a_small_table_as_bytes_does_not_release_the_gil() -> None:
    table = table_of(1 << 10)
    assert not any(runs_beside(lambda: _core.SampleTable.from_bytes(table.to_bytes())) for _ in range(20))


@pytest.mark.usefixtures("no_thread_is_interrupted")
def test_other_threads_run_while_a_large_delta_is_made_and_applied() -> None:
    base, new = np.zeros(1 << 24, np.uint8), np.ones(1 << 24, np.uint8)
    delta = _core.encode_delta(base, new, 2)
    assert delta is not None
    assert runs_beside_in_time(lambda: _core.encode_delta(base, new, 2))
    assert runs_beside_in_time(lambda: _core.apply_delta(base, delta, 2))
