"""Several servers of one model behind one client: each request goes to the server that its
`routing` chooses, and moves to another one when its server dies.

A server that holds requests without answering while others answer is probed, and its requests are
cancelled if it fails the probe.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ludic.errors import ConfigError, DataError, EngineDeadError, InferenceError, ServerError, ServerUnreachableError, check_value
from ludic.inference.servers.errors import RetryPolicy, is_missing_endpoint
from ludic.inference.servers.routing import Routing, make_router
from ludic.inference.servers.server import Server

logger = logging.getLogger(__name__)
T = TypeVar("T")

REFUSED_STATUS = frozenset({400, 413, 422})
"""Of a response to input that a server does not take."""
REST_S = 30.0
"""How long a drained server is left alone before it is probed."""
HOLD_S = 0.1
"""How often a call that is held back looks for a server that is not full."""


@dataclass(frozen=True)
class Restarts:
    """Somebody starts the servers of a pool again when they die."""

    find_url: Callable[[int], str | None]
    """The address of a server now, by its number in the pool; None while it has none."""
    find_end: Callable[[], str | None] = lambda: None
    """Why no server will come back; None while one may."""
    rest_s: float = 1.0
    """How long a drained server is left alone before it is probed."""
    look_s: float = 0.1
    """How often a call without a live server looks for one."""


class ServerPool:
    """Sends each call to a live server: by default the one with the fewest calls in flight, else by
    `routing`. With `max_kv_use`, the share of a server's KV cache above which it gets no more
    calls, a call waits while all live servers are full (`KVLimit`).

    An unreachable server, or one whose engine is dead, is drained: it gets no more requests, and
    its requests move to the others. After `rest_s` it is probed with `probe`, and takes requests
    again if that succeeds. With no server left, a call raises EngineDeadError or
    ServerUnreachableError naming them all.

    A server that hangs is drained too: it has answered nothing for `silence_s` while others answer
    or are idle, it fails the probe, and its `progress`, a number that rises while it works, does
    not change. Calls must therefore be safe to repeat. `silence_s=None` turns this off, so that
    each call waits for its own deadline.

    With `restarts`, a call without a live server waits for one, as long as its own deadline allows,
    and the only server of a pool is drained, too.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        probe: Callable[[Server], Awaitable[None]] | None = None,
        progress: Callable[[Server], Awaitable[float | None]] | None = None,
        rest_s: float = REST_S,
        silence_s: float | None = None,
        routing: Routing = "least_busy",
        max_kv_use: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not servers:
            raise ConfigError("a pool must have at least one server; pass its address")
        if len({server.url for server in servers}) != len(servers):
            raise ConfigError(f"an address is named twice among {[server.url for server in servers]}; name each once")
        self.servers = list(servers)
        self.moved = 0
        """Calls that were retried on another server."""
        self.held = 0
        """Calls that waited for room in a KV cache."""
        self.restarts: Restarts | None = None
        self.router = make_router(routing)
        check_value("max_kv_use", max_kv_use, "None sets no limit", above=0, most=1, optional=True)
        for server in servers:
            server.kv.most = max_kv_use
        self._probe, self._progress, self._rest_s, self._clock = probe, progress, rest_s, clock
        self._hang_detector = None if silence_s is None else HangDetector(self.servers, silence_s, self._check_alive, clock=clock)
        self._probes: dict[Server, asyncio.Task[None]] = {}

    @property
    def live(self) -> list[Server]:
        return [server for server in self.servers if server.drained is None]

    async def send(self, call: Callable[[Server], Awaitable[T]], prompt: Callable[[], Sequence[bytes]] = tuple) -> T:
        """Return what `call` returns at the first server that stays alive during it. `prompt` makes
        the keys of its prompt (`block_keys`), if `routing` needs them."""
        retried: set[str] = set()
        is_held = False
        keys = prompt() if self.router.reads_prompts and len(self.servers) > 1 else ()
        while True:
            self._probe_rested_servers()
            if self.restarts is not None and not self.live:
                if (end := self.restarts.find_end()) is not None:
                    raise EngineDeadError(end)
                await asyncio.sleep(self.restarts.look_s)
                continue
            if (server := self._choose(keys)) is None:
                self.held, is_held = self.held + (not is_held), True
                await asyncio.sleep(HOLD_S)
                continue
            server.in_flight += 1
            server.requests += 1
            self.router.record(server, keys)
            try:
                async with self._watch(server):
                    answer = await call(server)
                server.kv.record_answer()
                if server.drained is None:
                    self.router.record(server, keys)  # again: a push may have emptied its cache
                return answer
            except (EngineDeadError, ServerUnreachableError) as error:
                server.failures += 1
                if self.restarts is not None:
                    self.drain(server, str(error))
                    self.moved += 1
                    continue
                if len(self.servers) == 1 or server.url in retried:
                    raise
                if isinstance(error, EngineDeadError):
                    self.drain(server, str(error))
                elif server.drained is None and await self.probe(server):  # only the connection was cut
                    retried.add(server.url)
                if not self.live:
                    raise
                self.moved += 1
            finally:
                server.in_flight -= 1

    async def read(
        self, path: str, kind: type[T], body: dict[str, Any] | None = None, *, retries: RetryPolicy, refused: str, missing: str
    ) -> T:
        """The answer of a live server to a GET, or with a `body` to a POST, with retries. Raises
        DataError, which begins with `refused`, for input that it does not take, and InferenceError,
        which ends with `missing`, if it lacks the endpoint or the model."""

        async def once(server: Server) -> T:
            try:
                return (await (server.get(path) if body is None else server.post(path, body))).read(kind)
            except ServerError as error:
                if error.status in REFUSED_STATUS:
                    raise DataError(f"{refused}: {error}") from error
                if is_missing_endpoint(error):
                    raise InferenceError(f"{error}; {missing}") from error
                raise

        return await retries.run(lambda: self.send(once), name=f"{self.servers[0].url}{path}")

    def drain(self, server: Server, why: str) -> None:
        """Send a server no more requests until a probe succeeds. The only server of a pool is
        never drained, as there is no other, unless it is restarted."""
        if (len(self.servers) == 1 and self.restarts is None) or server.drained is not None:
            return
        server.drained, server.drained_at = why, self._clock()
        self.router.forget(server)
        logger.warning("%s gets no more requests: %s; %d servers are left", server.url, why, len(self.live))

    def drain_lost(self, urls: Collection[str]) -> None:
        """Drain the servers at these URLs, whose last push of weights failed."""
        for server in self.servers:
            if server.url in urls:
                self.drain(server, "its last push of weights could not be completed")

    async def probe(self, server: Server) -> bool:
        """Ask a server for one token; drain it if that fails, undrain it if it succeeds. Returns
        whether it is alive."""
        if self._probe is None and server.drained is not None:
            return False  # without a probe, nothing shows that it has recovered
        try:
            if self._probe is not None:
                await self._probe(server)
        except (InferenceError, TimeoutError) as error:
            server.drained_at = self._clock()
            self.drain(server, str(error))
            return False
        if server.drained is not None:
            logger.warning("%s answers again and gets requests", server.url)
            server.drained = None
        return True

    def counts(self) -> dict[str, int]:
        """`requests/<url>` and `failures/<url>` of each server, and the totals `moved`, `held` and
        `live`."""
        per_server = {
            f"{name}/{server.url}": getattr(server, name) for server in self.servers for name in ("requests", "failures")
        }
        return {**per_server, "moved": self.moved, "held": self.held, "live": len(self.live)}

    async def aclose(self) -> None:
        """Stop probing and close the connections of the running event loop."""
        for task in self._probes.values():
            task.cancel()
        self._probes.clear()
        if self._hang_detector is not None:
            self._hang_detector.stop()
        for server in self.servers:
            await server.aclose()

    def _watch(self, server: Server) -> AbstractAsyncContextManager[None]:
        """Watch a call for a hanging server, if there is another server to move to."""
        if self._hang_detector is None or self._probe is None or len(self.servers) == 1:
            return nullcontext()
        return self._hang_detector.watch(server)

    async def _check_alive(self, server: Server) -> bool:
        """Whether a silent server passes the probe or makes progress. Drains it if it does
        neither."""
        assert self._probe is not None
        before = await self._read_progress(server)
        try:
            await self._probe(server)
        except (InferenceError, TimeoutError) as error:
            after = await self._read_progress(server)
            if before is None or after is None or after <= before:
                self.drain(
                    server, f"it answered nothing while others did, and failed a probe ({str(error) or 'no answer in time'})"
                )
                return False
        return True

    async def _read_progress(self, server: Server) -> float | None:
        return None if self._progress is None else await self._progress(server)

    def _choose(self, keys: Sequence[bytes]) -> Server | None:
        """The server for a prompt; None while all live ones are full."""
        live = self.live
        if not live:
            reasons = "; ".join(f"{server.url}: {server.drained}" for server in self.servers)
            raise EngineDeadError(f"no server is left ({reasons}); start them again")
        is_open = [server for server in live if server.has_room()]
        return self.router.choose(is_open, keys) if is_open else None

    def _probe_rested_servers(self) -> None:
        """Start a background probe of each drained server that has rested and is not being probed
        already."""
        rest_s = self._rest_s if self.restarts is None else self.restarts.rest_s
        for server in self.servers:
            running = self._probes.get(server)
            if server.drained is None or self._clock() - server.drained_at < rest_s or (running and not running.done()):
                continue
            self._probes[server] = asyncio.create_task(self._probe_in_background(server))

    async def _probe_in_background(self, server: Server) -> None:
        if self.restarts is not None:
            server.url = self.restarts.find_url(self.servers.index(server)) or server.url
        await self.probe(server)


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
        check_value("silence_s", silence_s, "None turns the detection of hanging servers off", above=0)
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
        loop = asyncio.get_running_loop()
        if loop not in self._tasks or self._tasks[loop].done():
            self._tasks[loop] = loop.create_task(self._check_all(loop))
        try:
            async with asyncio.timeout(None) as scope:
                calls.scopes[scope] = loop
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
