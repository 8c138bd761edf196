"""Running foreign code safely: its exceptions become ordinary errors, and it can be stopped."""

import asyncio
import gc
from contextlib import suppress

import pytest
from jumping_loop import play_jumping

from ludic.errors import RolloutError
from ludic.event_loop import STOP_TIMEOUT_S, run_contained


async def raising(error):
    await asyncio.sleep(0)
    raise error


def outcome(work, **settings):
    """(result or error, elapsed time, number of tasks left running)."""

    async def scenario():
        try:
            result = await run_contained(work, what="the work", **settings)
        except Exception as error:
            result = error
        for _ in range(3):
            await asyncio.sleep(0)
        return result, asyncio.get_running_loop().time(), len(asyncio.all_tasks()) - 1

    return play_jumping(scenario())


class CustomBaseException(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SystemExit(3), "the work raised SystemExit: 3"),
        (GeneratorExit(), "the work raised GeneratorExit: "),
        (CustomBaseException("odd"), "the work raised CustomBaseException: odd"),
        (asyncio.CancelledError(), "the work waited for was cancelled"),
    ],
)
def test_exits_and_cancellations_become_rollout_errors(error, message):
    error_found, _, left = outcome(raising(error))
    assert isinstance(error_found, RolloutError)
    assert message in str(error_found)
    assert (error_found.__cause__, left) == (error, 0)


def test_ordinary_errors_and_results_pass_unchanged():
    error = OSError("gone")
    assert outcome(raising(error))[0] is error
    assert outcome(asyncio.sleep(0, "result"))[0] == "result"


def test_a_keyboard_interrupt_is_raised():
    with pytest.raises(KeyboardInterrupt):
        outcome(raising(KeyboardInterrupt()))


async def cancelling_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


def test_work_that_cancels_its_own_task_counts_as_failed():
    found, _, _ = outcome(cancelling_itself())
    assert str(found) == "the work cancelled itself"


async def swallowing(*kinds):
    for _ in range(
        5
    ):  # swallows more cancellations than are sent, but not forever: Python sends one more when the coroutine is freed
        with suppress(*kinds):
            await asyncio.Event().wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the third one comes from Python
@pytest.mark.parametrize("kinds", [(), (asyncio.CancelledError,), (BaseException,)])
def test_work_that_swallows_its_cancellation_is_abandoned(kinds, caplog):
    found, at, left = outcome(swallowing(*kinds), timeout_s=2.0)
    assert (type(found), str(found), left) == (TimeoutError, "the work took longer than 2.0 s", 0)
    assert at == (2.0 + STOP_TIMEOUT_S if kinds else 2.0)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(kinds)
    assert all("the work ignored its cancellation" in message for message in messages)
    del found  # its traceback refers to the coroutine
    gc.collect()  # free it here, where the warning is expected


def test_a_second_cancellation_does_not_wait_for_work_that_swallows_it():
    async def scenario():
        task = asyncio.create_task(run_contained(swallowing(asyncio.CancelledError), what="the work"))
        for _ in range(2):
            await asyncio.sleep(1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.get_running_loop().time()

    assert play_jumping(scenario()) == 2.0


def test_work_may_clean_up_after_a_cancellation():
    stopped = []

    async def careful():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(STOP_TIMEOUT_S - 1)
            stopped.append(True)

    found, at, _ = outcome(careful(), timeout_s=1.0)
    assert (type(found), at, stopped) == (TimeoutError, STOP_TIMEOUT_S, [True])
