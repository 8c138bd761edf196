"""Futures of a backend: a value or an error, now or later."""

import asyncio
import threading

import pytest

from ludic.training import TrainFuture


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
