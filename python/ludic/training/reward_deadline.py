"""Deadlines for plain reward functions, which block the thread that they run in."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from ludic.errors import LudicError
from ludic.event_loop import run_in_daemon_thread

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_HUNG_CALLS = 8
SLOW_CALL_S = 60.0
"""After so long, a call without a deadline is reported, once for each function."""


class RewardDeadlineExceeded(TimeoutError):
    """A reward function took longer than `timeout_s`."""


class CoroutineDeadlineExceeded(RewardDeadlineExceeded):
    """A coroutine function did, and was cancelled."""


class RewardsBroken(LudicError):
    """No reward of a function can be trusted: the run ends."""


class RewardsHung(RewardsBroken, RuntimeError):
    """More calls of reward functions hang than are allowed."""


class ThreadedCalls:
    """Calls plain functions in threads of their own, each with a deadline.

    A thread cannot be ended from outside: after the deadline it is left alone, and keeps its memory
    and its core until the function returns, or the process ends. At most `max_hung` such threads
    may be alive at a time.
    """

    def __init__(self, max_hung: int = MAX_HUNG_CALLS) -> None:
        self.max_hung = max_hung
        self._hung: set[object] = set()

    @property
    def hung(self) -> int:
        """Calls that are beyond their deadline and have not returned."""
        return len(self._hung)

    async def call(self, name: str, function: Callable[[], T], timeout_s: float) -> T:
        """`function()`. Raises RewardDeadlineExceeded after `timeout_s`; RewardsHung instead if
        that makes more than `max_hung` calls; and what the function raises."""
        call, is_done = object(), threading.Event()

        def work() -> T:
            try:
                return function()
            finally:
                is_done.set()
                self._hung.discard(call)

        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await run_in_daemon_thread(work, name=f"reward {name}")
        except TimeoutError as error:
            if not deadline.expired():
                raise
            self._hung.add(call)
            if is_done.is_set():  # it ended between the deadline and now
                self._hung.discard(call)
            if self.hung > self.max_hung:
                raise RewardsHung(
                    f"{self.hung} calls of reward functions have not returned {timeout_s:g} s after they began, the last one of {name}; "
                    f"their threads cannot be ended, and at most {self.max_hung} may hang. Give the function a deadline of its own "
                    "(subprocess.run(timeout=), requests.get(timeout=)), or raise reward_timeout_s if it is only slow"
                ) from error
            raise RewardDeadlineExceeded(
                f"it took longer than {timeout_s:g} s (reward_timeout_s); its thread cannot be ended and goes on"
            ) from error


def is_coroutine_function(function: Callable[..., object]) -> bool:
    """Whether a call returns a coroutine, and so cannot block."""
    inner = getattr(function, "func", function)  # functools.partial
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


@contextmanager
def report_slow_call(name: str, reported: set[str], after_s: float = SLOW_CALL_S) -> Iterator[None]:
    """Log a warning, once for each function, if the block takes longer than `after_s`: nothing else
    runs in the event loop meanwhile. It names the line that is being executed."""
    thread = threading.get_ident()

    def warn() -> None:
        if name in reported:
            return
        reported.add(name)
        logger.warning(
            "reward function %s has been running for %g s (%s), and everything waits for it; set reward_timeout_s to give it a deadline",
            name,
            after_s,
            _describe_frame(sys._current_frames().get(thread)),
        )

    timer = threading.Timer(after_s, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _describe_frame(frame: FrameType | None) -> str:
    return "its thread has ended" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
