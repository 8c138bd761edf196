"""Several servers of one model behind one client: each request goes to the least loaded server, and
moves to another one when its server dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from ludic.errors import ConfigError, EngineDeadError, InferenceError, ServerUnreachableError
from ludic.inference.servers.hang_detection import HangDetector
from ludic.inference.servers.server import Server

logger = logging.getLogger(__name__)
T = TypeVar("T")

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
                await self._wait_for_restart(self.restarts)
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

    async def _wait_for_restart(self, restarts: Restarts) -> None:
        """Wait a moment for a server that was restarted. Raises EngineDeadError if none will be."""
        if (end := restarts.find_end()) is not None:
            raise EngineDeadError(end)
        await asyncio.sleep(restarts.look_s)

    async def _probe_in_background(self, server: Server) -> None:
        if self.restarts is not None:
            server.url = self.restarts.find_url(self.servers.index(server)) or server.url
        await self.probe(server)
