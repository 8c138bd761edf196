"""Several servers of one model behind one client: each request goes to the least loaded server, and
moves to another one when its server dies.

A server that holds requests without answering while others answer is probed, and its requests are
cancelled if it fails the probe.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ludic.errors import ConfigError, DataError, EngineDeadError, InferenceError, ServerError, ServerUnreachableError, check_value
from ludic.inference.servers.errors import RetryPolicy, is_missing_endpoint
from ludic.inference.servers.http import Http, HttpResponse

logger = logging.getLogger(__name__)
T = TypeVar("T")

REFUSED_STATUS = frozenset({400, 413, 422})
"""Of a response to input that a server does not take."""
REST_S = 30.0
"""How long a drained server is left alone before it is probed."""


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
    """Sends each call to the live server with the fewest calls in flight.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not servers:
            raise ConfigError("a pool must have at least one server; pass its address")
        if len({server.url for server in servers}) != len(servers):
            raise ConfigError(f"an address is named twice among {[server.url for server in servers]}; name each once")
        self.servers = list(servers)
        self.moved = 0
        """Calls that were retried on another server."""
        self.restarts: Restarts | None = None
        self._probe, self._progress, self._rest_s, self._clock = probe, progress, rest_s, clock
        self._hang_detector = None if silence_s is None else HangDetector(self.servers, silence_s, self._check_alive, clock=clock)
        self._probes: dict[Server, asyncio.Task[None]] = {}

    @property
    def live(self) -> list[Server]:
        return [server for server in self.servers if server.drained is None]

    async def send(self, call: Callable[[Server], Awaitable[T]]) -> T:
        """Return what `call` returns at the first server that stays alive during it."""
        retried: set[str] = set()
        while True:
            self._probe_rested_servers()
            if self.restarts is not None and not self.live:
                if (end := self.restarts.find_end()) is not None:
                    raise EngineDeadError(end)
                await asyncio.sleep(self.restarts.look_s)
                continue
            server = self._least_loaded()
            server.in_flight += 1
            server.requests += 1
            try:
                async with self._watch(server):
                    return await call(server)
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
        """`requests/<url>` and `failures/<url>` of each server, and the totals `moved` and
        `live`."""
        per_server = {
            f"{name}/{server.url}": getattr(server, name) for server in self.servers for name in ("requests", "failures")
        }
        return {**per_server, "moved": self.moved, "live": len(self.live)}

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

    def _least_loaded(self) -> Server:
        live = self.live
        if not live:
            reasons = "; ".join(f"{server.url}: {server.drained}" for server in self.servers)
            raise EngineDeadError(f"no server is left ({reasons}); start them again")
        return min(live, key=lambda server: (server.in_flight, server.requests))

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


PROBE_TIMEOUT_S = 30.0


@dataclass(eq=False)
class Server:
    """One address, and the counts of requests sent to it."""

    url: str
    """Without `/v1`."""
    api_key: str = field(default="local", repr=False)
    timeout_s: float = 600.0
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request, in addition to the key."""
    in_flight: int = 0
    requests: int = 0
    """Requests that were sent here, including those that moved here from another server."""
    failures: int = 0
    """Requests that failed because the server was dead or unreachable."""
    drained: str | None = None
    """Why it gets no requests; None while it does."""
    drained_at: float = 0.0
    _connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Http] = field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )

    @property
    def request_headers(self) -> dict[str, str]:
        """Headers of every request, the key included."""
        return {"Authorization": f"Bearer {self.api_key}", **self.headers}

    def http(self) -> Http:
        """The connections of the running event loop: they belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections[loop] = Http(self.request_headers)
        return self._connections[loop]

    async def get(self, path: str) -> HttpResponse:
        """The response at a path from the server's root, within `timeout_s`. Raises
        InferenceError unless the status is 2xx."""
        return (await self.http().request("GET", f"{self.url}{path}", timeout_s=self.timeout_s)).raise_for_status()

    async def post(
        self, path: str, body: dict[str, Any], *, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> HttpResponse:
        """The response to a JSON body. Raises like `get`."""
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        response = await self.http().request("POST", f"{self.url}{path}", json=body, headers=headers, timeout_s=deadline_s)
        return response.raise_for_status()

    async def probe(self, path: str, body: dict[str, Any]) -> None:
        """Post with a short deadline; raises the error if that fails."""
        await self.post(path, body, timeout_s=PROBE_TIMEOUT_S)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        http = self._connections.pop(asyncio.get_running_loop(), None)
        if http is not None:
            await http.aclose()
