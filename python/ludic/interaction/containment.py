"""Runs users' code such as environments and agents so that its failures stay contained, whatever it
raises, and even if it ignores cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from ludic.errors import RolloutError
from ludic.event_loop import is_being_cancelled

logger = logging.getLogger(__name__)

T = TypeVar("T")
STOP_TIMEOUT_S = 30.0
"""How long cancelled code may take to end before it is closed by force."""


async def run_contained(work: Coroutine[Any, Any, T], *, what: str, timeout_s: float | None = None) -> T:
    """Await `work` in its own task and return its result. `what` names it in errors.

    Raises the Exception that `work` raises, and TimeoutError after `timeout_s`. SystemExit, other
    BaseExceptions, and the cancellation of something that `work` awaits become a RolloutError,
    because they would end the program or be lost. KeyboardInterrupt is raised unchanged.

    `work` is cancelled at the deadline, and when the caller is cancelled. If it ignores that, it is
    closed STOP_TIMEOUT_S later, with a warning. Neither code that blocks the event loop nor tasks
    that `work` starts can be stopped.
    """
    task = asyncio.create_task(_result_or_error(work, what))
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio logs it as never retrieved
    try:
        await asyncio.wait([task], timeout=timeout_s)
        late = not task.done()
    finally:
        if not task.done():
            await _stop(task, what)
    if late:
        raise TimeoutError(f"{what} took longer than {timeout_s} s")
    if task.cancelled():
        raise RolloutError(f"{what} cancelled itself")
    value, error = task.result()
    del task  # breaks a reference cycle: task, error, traceback, this frame
    try:
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
    finally:
        del error


async def _result_or_error(work: Coroutine[Any, Any, T], what: str) -> tuple[T | None, Exception | None]:
    """(result, None) of `work`, or (None, error). The error is returned because a task that raises
    SystemExit would stop the event loop."""
    try:
        return await work, None
    except KeyboardInterrupt:
        raise
    except asyncio.CancelledError as cancelled:
        if is_being_cancelled():
            raise
        return None, _set_cause(RolloutError(f"something that {what} waited for was cancelled"), cancelled)
    except Exception as error:
        return None, error
    except BaseException as error:
        return None, _set_cause(RolloutError(f"{what} raised {describe_error(error)}"), error)


def _set_cause(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


async def _stop(task: asyncio.Task[Any], what: str) -> None:
    """Cancel the task, wait, and close it by force if it still runs. Does not wait if the caller is
    cancelled again."""
    task.cancel()
    try:
        await asyncio.wait([task], timeout=STOP_TIMEOUT_S)
    finally:
        if not task.done():
            logger.warning("%s ignored its cancellation and is closed by force", what)
            coroutine: Any = task.get_coro()
            coroutine.close()  # the task has nothing left to run
            task.cancel()


def describe_error(error: BaseException | None) -> str:
    """Type and message of an error, even if its `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose message cannot be shown"
