"""Coroutines for code that cannot await: one event loop for the process, in a thread that is
nobody's else.

Unlike `asyncio.run`, this works where a loop runs already, and leaves at its deadline a call that
waits in another thread, as one for the address of a host does.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, begun when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises. It is cancelled where this thread is
        interrupted, by Ctrl-C for one."""
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
    """Run a coroutine from code that cannot await. It must end by a deadline of its own."""
    return _thread.run(coroutine)


def _begin_anew() -> None:
    """A fork has the loop and not its thread."""
    global _thread
    _thread = LoopThread()


os.register_at_fork(after_in_child=_begin_anew)
