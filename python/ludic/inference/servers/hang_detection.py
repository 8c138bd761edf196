"""Detects servers that hold requests without answering while others answer: such a server is
probed, and its requests are cancelled if it fails the probe."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ludic.errors import ConfigError, InferenceError, ServerUnreachableError
from ludic.inference.servers.server import Server

CHECKS_PER_SILENCE = 4
"""How often servers are checked within `silence_s`."""


@dataclass
class _Calls:
    """The calls in flight at one server."""

    scopes: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = field(default_factory=dict)
    """Timeout scope of each call, with which it can be cancelled -> its event loop."""
    quiet_since: float = 0.0
    """When the server last answered anything, or got its first call."""
    answered_at: float = float("-inf")


class HangDetector:
    """Watches calls in flight. A call may take long: its server is given up only if it also fails a
    probe."""

    def __init__(
        self,
        servers: Sequence[Server],
        silence_s: float,
        is_alive: Callable[[Server], Awaitable[bool]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_alive` probes a server that has been silent for `silence_s`, and drains it if it is
        dead."""
        if not silence_s > 0:
            raise ConfigError(f"silence_s ({silence_s}) must be > 0; None turns the detection of hanging servers off")
        self.silence_s = silence_s
        self._is_alive, self._clock = is_alive, clock
        self._calls = {server: _Calls() for server in servers}
        self._tasks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def watch(self, server: Server) -> AsyncIterator[None]:
        """Watch the call made inside the block. Raises ServerUnreachableError when the server is
        drained during the call."""
        calls = self._calls[server]
        if not calls.scopes:
            calls.quiet_since = self._clock()
        self._start_checks()
        try:
            async with asyncio.timeout(None) as scope:
                calls.scopes[scope] = asyncio.get_running_loop()
                try:
                    yield
                finally:
                    del calls.scopes[scope]
        except TimeoutError as error:
            if scope.expired():
                raise ServerUnreachableError(f"{server.url} was given up: {server.drained}") from error
            raise
        except InferenceError as error:
            if not isinstance(error, ServerUnreachableError):
                self._record_answer(calls)
            raise
        self._record_answer(calls)

    def stop(self) -> None:
        """Stop the checks of the running event loop."""
        task = self._tasks.pop(asyncio.get_running_loop(), None)
        if task is not None:
            task.cancel()

    def _record_answer(self, calls: _Calls) -> None:
        calls.quiet_since = calls.answered_at = self._clock()

    def _start_checks(self) -> None:
        loop = asyncio.get_running_loop()
        if loop not in self._tasks or self._tasks[loop].done():
            self._tasks[loop] = loop.create_task(self._check_all(loop))

    async def _check_all(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the servers as long as they have calls of this loop."""
        while busy := [server for server, calls in self._calls.items() if loop in calls.scopes.values()]:
            await asyncio.gather(*(self._check(server, self._calls[server], loop) for server in busy))
            await asyncio.sleep(self.silence_s / CHECKS_PER_SILENCE)

    async def _check(self, server: Server, calls: _Calls, loop: asyncio.AbstractEventLoop) -> None:
        """Probe a silent server; cancel its calls on this loop if it is drained."""
        if server.drained is None and self._is_silent(server, calls) and await self._is_alive(server):
            calls.quiet_since = self._clock()
        if server.drained is not None:
            for scope in [scope for scope, owner in calls.scopes.items() if owner is loop and not scope.expired()]:
                scope.reschedule(loop.time())

    def _is_silent(self, server: Server, calls: _Calls) -> bool:
        """Whether the server has been silent for too long while another live server answered or was
        idle."""
        return self._clock() - calls.quiet_since > self.silence_s and any(
            not others.scopes or others.answered_at > calls.quiet_since
            for other, others in self._calls.items()
            if other is not server and other.drained is None
        )
