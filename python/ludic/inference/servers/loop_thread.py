"""Runs coroutines for code that cannot await, on one event loop in a thread of its own.

Unlike `asyncio.run`, this works where a loop runs already, and its deadlines also end a call that
waits in another thread, such as a name resolution.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, started at the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns. It is cancelled when this thread is interrupted, by
        Ctrl-C for example."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="ludic-http", daemon=True).start()
            return self._loop


_thread = LoopThread()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from code that cannot await. It must have a deadline of its own."""
    return _thread.run(coroutine)


def _reset_in_fork() -> None:
    """A fork copies the loop but not its thread."""
    global _thread
    _thread = LoopThread()


os.register_at_fork(after_in_child=_reset_in_fork)
