"""Servers that hold calls and answer none while others would: they are asked whether they live,
and left where they do not."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ludic.errors import ConfigError, InferenceError, ServerUnreachableError

if TYPE_CHECKING:
    from ludic.inference.servers.pool import Server

LOOKS = 4
"""How often it is looked within the time that a server may be silent."""


@dataclass
class _Calls:
    """What one server holds."""

    scopes: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = field(default_factory=dict)
    """One for each call, by which it is broken off."""
    quiet_since: float = 0.0
    """When it last answered anything, or was given its first call."""
    answered_at: float = float("-inf")


class SilenceWatch:
    """Looks after calls in flight. One that long is no fault: only a server that also fails when
    it is asked is left."""

    def __init__(
        self,
        servers: Sequence[Server],
        silence_s: float,
        lives: Callable[[Server], Awaitable[bool]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lives` says whether a server that has been silent for `silence_s` is alive, and
        drains it if it is not."""
        if not silence_s > 0:
            raise ConfigError(f"silence_s ({silence_s}) must be > 0; None waits for each request's own deadline")
        self.silence_s = silence_s
        self._lives, self._clock = lives, clock
        self._calls = {server: _Calls() for server in servers}
        self._tasks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def over(self, server: Server) -> AsyncIterator[None]:
        """Around a call. ServerUnreachableError where the server is left while it holds the
        call: it has been drained."""
        calls = self._calls[server]
        if not calls.scopes:
            calls.quiet_since = self._clock()
        self._look_on()
        try:
            async with asyncio.timeout(None) as scope:
                calls.scopes[scope] = asyncio.get_running_loop()
                try:
                    yield
                finally:
                    del calls.scopes[scope]
        except TimeoutError as error:
            if scope.expired():
                raise ServerUnreachableError(f"{server.url} was left: {server.drained}") from error
            raise
        except InferenceError as error:
            if not isinstance(error, ServerUnreachableError):
                self._answered(calls)
            raise
        self._answered(calls)

    def stop(self) -> None:
        """In the event loop that runs."""
        task = self._tasks.pop(asyncio.get_running_loop(), None)
        if task is not None:
            task.cancel()

    def _answered(self, calls: _Calls) -> None:
        calls.quiet_since = calls.answered_at = self._clock()

    def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        if loop not in self._tasks or self._tasks[loop].done():
            self._tasks[loop] = loop.create_task(self._look(loop))

    async def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """While calls of this loop are in flight."""
        while held := [server for server, calls in self._calls.items() if loop in calls.scopes.values()]:
            await asyncio.gather(*(self._look_at(server, self._calls[server], loop) for server in held))
            await asyncio.sleep(self.silence_s / LOOKS)

    async def _look_at(self, server: Server, calls: _Calls, loop: asyncio.AbstractEventLoop) -> None:
        if server.drained is None and self._is_silent(server, calls) and await self._lives(server):
            calls.quiet_since = self._clock()
        if server.drained is not None:
            for scope in [scope for scope, owner in calls.scopes.items() if owner is loop and not scope.expired()]:
                scope.reschedule(loop.time())

    def _is_silent(self, server: Server, calls: _Calls) -> bool:
        """For too long, while another was not, or has nothing to do."""
        return self._clock() - calls.quiet_since > self.silence_s and any(
            not theirs.scopes or theirs.answered_at > calls.quiet_since
            for other, theirs in self._calls.items()
            if other is not server and other.drained is None
        )
