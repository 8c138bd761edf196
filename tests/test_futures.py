"""Futures of a backend: a value or an error, now or later."""

import asyncio
import gc
import threading
from concurrent.futures import InvalidStateError

import pytest
from hypothesis import given, strategies as st

from ludic.event_loop import ImmediateTrainFuture, TrainFuture, wait_all


def test_a_result_of_none_is_a_result():
    future = TrainFuture.of("load", lambda: None)
    assert future.done()
    assert asyncio.run(future.result()) is None


def test_an_error_is_raised_by_every_call_of_result_and_only_there():
    future = TrainFuture.of("optim_step", lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(future.result())


async def test_a_result_set_from_a_thread_wakes_every_waiter():
    future = TrainFuture("forward_backward")
    waiting = [asyncio.create_task(future.result()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not future.done()
    assert "pending" in repr(future)
    threading.Thread(target=future.set_result, args=(5,)).start()
    assert await asyncio.gather(*waiting) == [5, 5, 5]


async def test_an_error_can_be_set():
    future = TrainFuture("save")
    future.set_exception(OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        await future.result()


async def test_cancelling_one_waiter_does_not_cancel_the_others():
    future = TrainFuture("export_weights")
    impatient = asyncio.create_task(future.result())
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    future.set_result(1)
    assert await future.result() == 1


def test_a_result_that_comes_after_its_waiters_event_loop_ended_is_there_for_the_next():
    future = TrainFuture[int]("save")

    async def give_up() -> None:
        waiting = asyncio.create_task(future.result())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    future.set_result(1)
    assert asyncio.run(future.result()) == 1


@pytest.mark.parametrize("set_value", ["set_result", "set_exception"])
def test_a_second_value_is_an_error_and_changes_nothing(set_value):
    future = ImmediateTrainFuture(1, "optim_step")
    with pytest.raises(InvalidStateError):
        getattr(future, set_value)(ValueError("late"))
    assert future.wait() == 1


async def test_an_immediate_future_is_done_and_can_hold_none():
    future = ImmediateTrainFuture(None, "load_weights")
    assert future.done()
    assert await future is None
    assert repr(future) == "ImmediateTrainFuture(load_weights, done)"


@given(st.permutations(range(5)), st.sets(st.integers(0, 4)))
def test_wait_all_waits_for_all_and_keeps_the_order(finish_order, failing):
    futures = [TrainFuture[int](str(number)) for number in range(5)]

    def finish() -> None:
        for number in finish_order:
            if number in failing:
                futures[number].set_exception(ValueError(str(number)))
            else:
                futures[number].set_result(number)

    async def wait() -> object:
        threading.Thread(target=finish).start()
        try:
            return await wait_all(futures)
        except ValueError as error:
            return str(error)

    outcome = asyncio.run(wait())
    assert all(future.done() for future in futures)
    assert outcome == (str(min(failing)) if failing else [0, 1, 2, 3, 4])


async def test_a_future_that_nobody_awaits_is_silent():
    TrainFuture.of("optim_step", lambda: 1 / 0)
    gc.collect()
