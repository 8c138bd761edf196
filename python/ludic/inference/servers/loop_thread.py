"""Runs coroutines for synchronous code, on one event loop in its own thread.

Unlike `asyncio.run`, this also works inside a running event loop, and deadlines also end calls that
wait for another thread, such as name resolution.
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
        """Return the result of the coroutine. It is cancelled when this thread is interrupted, for
        example by Ctrl-C."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._get_loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="ludic-http", daemon=True).start()
            return self._loop


_thread = LoopThread()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, which must have its own deadline, from synchronous code."""
    return _thread.run(coroutine)


def _reset_in_fork() -> None:
    """Make a new thread in a forked process: a fork copies the loop but not its thread."""
    global _thread
    _thread = LoopThread()


os.register_at_fork(after_in_child=_reset_in_fork)
