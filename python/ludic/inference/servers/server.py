"""One server of a pool: its address, its connections, and what was sent to it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludic.inference.servers.admission import KVLimit, read_metrics
from ludic.inference.servers.http import Http, HttpResponse

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
    kv: KVLimit = field(default_factory=KVLimit, repr=False)
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

    def has_room(self) -> bool:
        """Whether it may get one more call. Has its metrics read, if it is time."""
        if self.kv.is_due():
            self.kv.reading = asyncio.create_task(self._read_metrics())
        return self.in_flight < self.kv.calls

    async def _read_metrics(self) -> None:
        self.kv.record_metrics(await read_metrics(self.request_headers, self.url), self.in_flight)

    async def aclose(self) -> None:
        """Close the connections of the running event loop, and stop reading metrics in it."""
        reading = self.kv.reading
        if reading is not None and reading.get_loop() is asyncio.get_running_loop():
            reading.cancel()
        http = self._connections.pop(asyncio.get_running_loop(), None)
        if http is not None:
            await http.aclose()
