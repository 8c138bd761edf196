"""Running coroutines from synchronous code, and work that a cancellation must not interrupt."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ludic.event_loop import EventLoop, await_if_needed, call_outside_loop, is_being_cancelled, run_to_completion


async def current_loop():
    return asyncio.get_running_loop()


def test_all_coroutines_run_on_one_loop():
    events = EventLoop()
    assert events.run(current_loop(), instead="it") is events.run(current_loop(), instead="it")


def test_a_running_loop_is_not_entered_again():
    async def nested():
        EventLoop().run(current_loop(), instead="run_eval(...)")

    with pytest.raises(RuntimeError, match=r"use `await run_eval\(\.\.\.\)`"):
        asyncio.run(nested())


def test_plain_values_and_coroutine_results_are_handled_alike():
    async def both():
        async def three():
            return 3

        return await await_if_needed(3), await await_if_needed(three())

    assert asyncio.run(both()) == (3, 3)


def test_a_cancellation_is_raised_after_the_work_has_finished():
    steps = []

    async def cancel_during_work():
        started, may_end = asyncio.Event(), asyncio.Event()

        async def work():
            started.set()
            await may_end.wait()
            steps.append("worked")

        task = asyncio.create_task(run_to_completion(work()))
        await started.wait()
        task.cancel()
        await asyncio.sleep(0)
        steps.append(f"done: {task.done()}")
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_during_work())
    assert steps == ["done: False", "worked"]


def test_work_returns_its_result_or_raises_its_error():
    async def fail():
        raise ValueError("no")

    async def seven():
        return 7

    assert asyncio.run(run_to_completion(seven())) == 7
    with pytest.raises(ValueError, match="no"):
        asyncio.run(run_to_completion(fail()))


def test_a_task_knows_that_it_is_being_cancelled():
    seen = []

    async def task():
        seen.append(is_being_cancelled())
        try:
            await asyncio.sleep(3600)
        finally:
            seen.append(is_being_cancelled())

    async def run():
        running = asyncio.create_task(task())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(run())
    assert seen == [False, True]


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_call_in_a_thread_is_asked_to_end_and_left_alone_after_a_second_interrupt(monkeypatch, interrupts):
    may_end, asked, started = threading.Event(), [], []

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments):
            future = super().submit(*arguments)
            wait, left = future.result, [KeyboardInterrupt] * interrupts

            def result():
                if left:
                    raise left.pop()
                may_end.set()
                return wait()

            future.result = result
            started.append(future)
            return future

    def call():
        assert may_end.wait(60)
        return 7

    async def cell():
        return call_outside_loop(call, on_interrupt=lambda: asked.append("end"))

    monkeypatch.setattr("ludic.event_loop.ThreadPoolExecutor", Interrupted)
    loop = asyncio.new_event_loop()
    try:
        if interrupts == 1:
            assert loop.run_until_complete(cell()) == 7
        else:
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(cell())
            assert not started[0].done()  # nobody waited for it
    finally:
        may_end.set()
        loop.close()
    assert asked == ["end"]
