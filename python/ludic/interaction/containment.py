"""Runs code that is not ours so that it can fail and nothing else does: whatever it raises, and
though it will not stop."""

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
"""How long what was cancelled may take to end, before it is ended by force."""


async def contained(work: Coroutine[Any, Any, T], *, what: str, timeout_s: float | None = None) -> T:
    """Await `work` in a task of its own. `what` names it in errors.

    Raises the Exception that `work` raises; a RolloutError for what else would end the program or
    vanish: SystemExit, any other BaseException, and a cancellation of something that it waited for.
    KeyboardInterrupt passes: it is the user's. Raises TimeoutError after `timeout_s`.

    At the deadline `work` is cancelled, and so it is with the caller. If it swallows that and goes
    on, it is closed STOP_TIMEOUT_S later, with a warning. Code that blocks the event loop cannot be
    stopped, nor can tasks that `work` starts.
    """
    task = asyncio.create_task(_settled(work, what))
    task.add_done_callback(_look_away)
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
    del task  # it holds the error, whose traceback holds this frame: a circle
    try:
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
    finally:
        del error


async def _settled(work: Coroutine[Any, Any, T], what: str) -> tuple[T | None, Exception | None]:
    """What `work` gave or the error that it raised: a task that raises SystemExit itself would
    stop the event loop."""
    try:
        return await work, None
    except KeyboardInterrupt:
        raise
    except asyncio.CancelledError as cancelled:
        if is_being_cancelled():
            raise
        return None, _caused(RolloutError(f"something that {what} waited for was cancelled"), cancelled)
    except Exception as error:
        return None, error
    except BaseException as error:
        return None, _caused(RolloutError(f"{what} raised {message_of(error)}"), error)


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


async def _stop(task: asyncio.Task[Any], what: str) -> None:
    """Cancel, wait, and end by force what is still there; at once if the caller is cancelled
    again meanwhile."""
    task.cancel()
    try:
        await asyncio.wait([task], timeout=STOP_TIMEOUT_S)
    finally:
        if not task.done():
            _end(task, what)


def _end(task: asyncio.Task[Any], what: str) -> None:
    """Close the coroutine under its task, which then has nothing left to run."""
    logger.warning("%s went on although it was cancelled, and is closed by force", what)
    coroutine: Any = task.get_coro()
    coroutine.close()
    task.cancel()


def _look_away(task: asyncio.Task[Any]) -> None:
    """The loop complains of errors that nobody saw: an interrupt, which it raises itself, and
    that the coroutine was closed."""
    if not task.cancelled():
        task.exception()


def message_of(error: BaseException | None) -> str:
    """Type and message, on one condition less than usual: an error whose `__str__` raises has
    none."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose message cannot be shown"
