"""Several servers of one model behind one client: each request goes to the one with the least to
do, and away from one that is dead."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ludic.errors import ConfigError, EngineDeadError, InferenceError, ServerUnreachableError
from ludic.inference.servers.hang_detection import SilenceWatch
from ludic.inference.servers.http import Answer, Http

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_TIMEOUT_S = 30.0
REST_S = 30.0
"""How long a drained server is left alone before it is probed."""


@dataclass(eq=False)
class Server:
    """One address, and what has been asked of it."""

    url: str
    """Without `/v1`."""
    api_key: str = field(default="local", repr=False)
    timeout_s: float = 600.0
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request, beside the key."""
    in_flight: int = 0
    requests: int = 0
    """Begun here, those moved here from another among them."""
    failures: int = 0
    """Requests that ended because the server was dead or out of reach."""
    drained: str | None = None
    """Why it gets no requests; None while it does."""
    drained_at: float = 0.0
    _connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Http] = field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )

    @property
    def request_headers(self) -> dict[str, str]:
        """What goes with every request."""
        return {"Authorization": f"Bearer {self.api_key}", **self.headers}

    def http(self) -> Http:
        """For the event loop that runs: connections belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections[loop] = Http(self.request_headers)
        return self._connections[loop]

    async def get(self, path: str) -> Answer:
        """What the server answers at a path from its root, within `timeout_s`. Raises
        InferenceError for anything but a 2xx."""
        return (await self.http().ask("GET", f"{self.url}{path}", timeout_s=self.timeout_s)).checked()

    async def post(
        self, path: str, body: dict[str, Any], *, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Answer:
        """What it answers to a body. Raises as `get`."""
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        return (await self.http().ask("POST", f"{self.url}{path}", json=body, headers=headers, timeout_s=deadline_s)).checked()

    async def probe(self, path: str, body: dict[str, Any]) -> None:
        """Return if there is an answer in time, or raise the error that says why there is none."""
        await self.post(path, body, timeout_s=PROBE_TIMEOUT_S)

    async def aclose(self) -> None:
        """Close the connections of the event loop that runs."""
        http = self._connections.pop(asyncio.get_running_loop(), None)
        if http is not None:
            await http.aclose()


class ServerPool:
    """Sends each call to the live server with the fewest calls in flight.

    A server that is out of reach, or whose engine is dead, is drained: it gets no more requests,
    and those that it had move to the others. After `rest_s` it is probed by `probe`, and taken back
    if that passes. With none left, a call is an EngineDeadError or a ServerUnreachableError that
    names them all.

    So is one that hangs: that answers nothing for `silence_s` while others answer or are idle,
    fails the probe, and makes no `progress`, a number that rises while it works. Calls must be such
    that they can be made twice. With None each call waits for its own deadline.
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
            raise ConfigError("a pool of servers must have one at least; give its address")
        if len({server.url for server in servers}) != len(servers):
            raise ConfigError(f"an address is named twice among {[server.url for server in servers]}; name each once")
        self.servers = list(servers)
        self.moved = 0
        """Calls that went on at another server."""
        self._probe, self._progress, self._rest_s, self._clock = probe, progress, rest_s, clock
        self._silence = None if silence_s is None else SilenceWatch(self.servers, silence_s, self._lives, clock=clock)
        self._probes: dict[Server, asyncio.Task[None]] = {}

    @property
    def live(self) -> list[Server]:
        return [server for server in self.servers if server.drained is None]

    async def send(self, call: Callable[[Server], Awaitable[T]]) -> T:
        """What `call` gives at the first server that lives through it."""
        cut: set[str] = set()
        while True:
            self._look_after_drained()
            server = self._least_loaded()
            server.in_flight += 1
            server.requests += 1
            try:
                async with self._watched(server):
                    return await call(server)
            except (EngineDeadError, ServerUnreachableError) as error:
                server.failures += 1
                if len(self.servers) == 1 or server.url in cut:
                    raise
                if isinstance(error, EngineDeadError):
                    self.drain(server, str(error))
                elif server.drained is None and await self.probe(server):  # a connection that was cut, and no more
                    cut.add(server.url)
                if not self.live:
                    raise
                self.moved += 1
            finally:
                server.in_flight -= 1

    def drain(self, server: Server, why: str) -> None:
        """Give it no more requests until a probe passes. The only server of a pool is never
        drained: there is nowhere to go."""
        if len(self.servers) == 1 or server.drained is not None:
            return
        server.drained, server.drained_at = why, self._clock()
        logger.warning("%s gets no more requests: %s; %d servers are left", server.url, why, len(self.live))

    async def probe(self, server: Server) -> bool:
        """Whether the server lives, found by one token; takes it back or drains it accordingly."""
        if self._probe is None and server.drained is not None:
            return False  # nothing says that it is what it was
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
        """`requests/<url>` and `failures/<url>` of each server, `moved`, and how many are
        `live`."""
        each = {f"{what}/{server.url}": getattr(server, what) for server in self.servers for what in ("requests", "failures")}
        return {**each, "moved": self.moved, "live": len(self.live)}

    async def aclose(self) -> None:
        """Stop probing and close the connections of this event loop."""
        for task in self._probes.values():
            task.cancel()
        self._probes.clear()
        if self._silence is not None:
            self._silence.stop()
        for server in self.servers:
            await server.aclose()

    def _watched(self, server: Server) -> AbstractAsyncContextManager[None]:
        """Around a call, which may be broken off where there is another server to go to."""
        if self._silence is None or self._probe is None or len(self.servers) == 1:
            return nullcontext()
        return self._silence.over(server)

    async def _lives(self, server: Server) -> bool:
        """Whether a server that is silent gives a token, or else works on what it has. One that
        does not is drained."""
        assert self._probe is not None
        before = await self._worked(server)
        try:
            await self._probe(server)
        except (InferenceError, TimeoutError) as error:
            after = await self._worked(server)
            if before is None or after is None or after <= before:
                self.drain(
                    server, f"it answered nothing while others did, nor when it was probed ({str(error) or 'no answer in time'})"
                )
                return False
        return True

    async def _worked(self, server: Server) -> float | None:
        return None if self._progress is None else await self._progress(server)

    def _least_loaded(self) -> Server:
        live = self.live
        if not live:
            told = "; ".join(f"{server.url}: {server.drained}" for server in self.servers)
            raise EngineDeadError(f"no server is left ({told}); start them again")
        return min(live, key=lambda server: (server.in_flight, server.requests))

    def _look_after_drained(self) -> None:
        """Begin to probe those that have rested, one probe each at a time, beside the requests."""
        for server in self.servers:
            running = self._probes.get(server)
            if server.drained is None or self._clock() - server.drained_at < self._rest_s or (running and not running.done()):
                continue
            self._probes[server] = asyncio.create_task(self._probed(server))

    async def _probed(self, server: Server) -> None:
        await self.probe(server)
