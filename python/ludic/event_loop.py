"""Coroutines from synchronous code, on one event loop that lasts, so that clients bound to it
live from step to step."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines one after another on a loop of its own, made when first needed and closed
    with this object."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, coroutine: Coroutine[Any, Any, T], *, instead: str) -> T:
        """Run to the end and return the result. Inside a running loop it is an error; `instead`
        says what to await there."""
        if _is_running():
            coroutine.close()
            raise RuntimeError(f"an event loop is running already, and a second cannot run inside it; use `await {instead}`")
        if self._runner is None:
            self._runner = asyncio.Runner()
            weakref.finalize(self, _close, self._runner)
        return self._runner.run(coroutine)


def _close(runner: asyncio.Runner) -> None:
    if _is_running():  # collected while another loop runs: that one must not be entered
        runner.get_loop().close()
    else:
        runner.close()


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def awaited(value: Any) -> Any:
    """What a user's function gave, whether it is plain, a coroutine function, or returns
    something to await."""
    return await value if inspect.isawaitable(value) else value
