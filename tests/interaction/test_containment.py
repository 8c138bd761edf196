"""Code that is not ours, contained: what it raises is an error of its own, and its end can be
forced."""

import asyncio
import gc
from contextlib import suppress

import pytest
from jumping_loop import play_jumping

from ludic.errors import RolloutError
from ludic.interaction.containment import STOP_TIMEOUT_S, run_contained


async def raising(error):
    await asyncio.sleep(0)
    raise error


def outcome(work, **settings):
    """What it gives, the time that took, and the tasks left over."""

    async def scenario():
        try:
            result = await run_contained(work, what="the work", **settings)
        except Exception as error:
            result = error
        for _ in range(3):
            await asyncio.sleep(0)
        return result, asyncio.get_running_loop().time(), len(asyncio.all_tasks()) - 1

    return play_jumping(scenario())


class Own(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(3), "the work raised SystemExit: 3"),
        (GeneratorExit(), "the work raised GeneratorExit: "),
        (Own("odd"), "the work raised Own: odd"),
        (asyncio.CancelledError(), "something that the work waited for was cancelled"),
    ],
)
def test_what_would_end_the_program_or_vanish_is_an_error_that_names_it(error, said):
    found, _, left = outcome(raising(error))
    assert isinstance(found, RolloutError)
    assert (str(found), found.__cause__, left) == (said, error, 0)


def test_ordinary_errors_pass_as_they_are_and_so_do_results():
    error = OSError("gone")
    assert outcome(raising(error))[0] is error
    assert outcome(asyncio.sleep(0, "result"))[0] == "result"


def test_an_interrupt_is_the_users():
    with pytest.raises(KeyboardInterrupt):
        outcome(raising(KeyboardInterrupt()))


async def cancelling_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


def test_work_that_cancels_its_own_task_has_failed():
    found, _, _ = outcome(cancelling_itself())
    assert str(found) == "the work cancelled itself"


async def swallowing(*kinds):
    for _ in range(5):  # more often than it is told to stop, and not without end: Python itself asks once more when it is freed
        with suppress(*kinds):
            await asyncio.Event().wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python's, for the third kind
@pytest.mark.parametrize("kinds", [(), (asyncio.CancelledError,), (BaseException,)])
def test_work_that_swallows_its_cancellation_is_not_waited_for_without_end(kinds, caplog):
    found, at, left = outcome(swallowing(*kinds), timeout_s=2.0)
    assert (type(found), str(found), left) == (TimeoutError, "the work took longer than 2.0 s", 0)
    assert at == (2.0 + STOP_TIMEOUT_S if kinds else 2.0)
    said = ["the work ignored its cancellation and is closed by force"] if kinds else []
    assert [record.getMessage() for record in caplog.records] == said
    del found  # its traceback holds the coroutine
    gc.collect()  # here, where the warning is expected


def test_who_is_cancelled_twice_does_not_wait_for_what_swallows_it():
    async def scenario():
        task = asyncio.create_task(run_contained(swallowing(asyncio.CancelledError), what="the work"))
        for _ in range(2):
            await asyncio.sleep(1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.get_running_loop().time()

    assert play_jumping(scenario()) == 2.0


def test_work_may_take_its_time_to_stop():
    stopped = []

    async def careful():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(STOP_TIMEOUT_S - 1)
            stopped.append(True)

    found, at, _ = outcome(careful(), timeout_s=1.0)
    assert (type(found), at, stopped) == (TimeoutError, STOP_TIMEOUT_S, [True])
