"""The vLLM servers behind one client: sends calls to them, tracks their weight version, and finds
the endpoint that takes token ids: `/inference/v1/generate` on a vLLM server started with
`--enable-scale-out`, else `/v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from ludic.errors import InferenceError
from ludic.inference.servers.answers import is_at_least, version_number
from ludic.inference.servers.errors import AbortedError, RetryPolicy, StaleWeightsError
from ludic.inference.servers.http import run_blocking
from ludic.inference.servers.pool import Server, ServerPool
from ludic.inference.vllm.server_queries import (
    read_progress,
    read_served,
    read_version,
    wait_for_servers,
)

T = TypeVar("T")

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
VERSION_AGE_S = 1.0
"""How long a version that was read is used for requests to endpoints that do not report it."""


class VLLMServers:
    """One or more servers of the same model, with retries."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        retries: RetryPolicy,
        api_key: str,
        headers: Mapping[str, str],
        silence_s: float | None,
        connection_timeout_s: float,
    ) -> None:
        """Waits until every server is healthy. Raises HealthTimeoutError after
        `connection_timeout_s`."""
        self.urls = list(urls)
        self._retries = retries
        servers = [Server(url, api_key, retries.timeout_s, headers=dict(headers)) for url in urls]
        self.pool = ServerPool(
            servers,
            probe=self._probe,
            progress=lambda server: read_progress(server.request_headers, server.url),
            silence_s=silence_s,
        )
        self.request_headers = servers[0].request_headers
        """Sent with every request, the key included."""
        self.aborted = 0
        """Responses that the servers aborted."""
        self.context_lengths, self.version = run_blocking(wait_for_servers(self.request_headers, urls, connection_timeout_s))
        self._version_read_at = time.monotonic()

    @property
    def name(self) -> str:
        """The servers' name in error messages."""
        return self.urls[0] if len(self.urls) == 1 else f"none of {len(self.urls)} servers"

    async def send(self, call: Callable[[Server], Awaitable[T]], *, reports_version: bool) -> tuple[T, int]:
        """Return what `call` returns at a live server, and the version served before it. Unless
        the response `reports_version`, that version is read first, at most once in
        `VERSION_AGE_S`."""

        async def counting_aborts(server: Server) -> T:
            try:
                return await call(server)
            except AbortedError:
                self.aborted += 1
                raise

        async def attempt() -> tuple[T, int]:
            if not reports_version and time.monotonic() - self._version_read_at > VERSION_AGE_S:
                self._version_read_at = time.monotonic()
                await self.read_version()
            version = self.version
            return await self.pool.send(counting_aborts), version

        return await self._retries.run(attempt, name=self.name)

    def check_served(self, server: Server, spans: Sequence[Mapping[str, Any]], least: int) -> None:
        """If servers are restarted, raise StaleWeightsError for an answer of a version that was not
        published, or is older than `least`, the version at the request. The server is then drained
        until it has been given the newest.

        A server that was restarted says `default`, whatever weights it has, until a push has loaded
        others: with the answer itself it says that nothing has been published to it since it
        started."""
        if self.pool.restarts is None:
            return
        if stale := [span["version"] for span in spans if not is_at_least(span["version"], least)] or ([] if spans else [None]):
            raise StaleWeightsError(
                f"{server.url} samples with version {stale[0]} of the weights, not with {least} or a later one; it was restarted, or "
                "missed a push"
            )

    async def has_version(self, version: int) -> bool:
        """Whether a server has this version, or a later one."""
        held = await asyncio.gather(*(read_served(server.request_headers, server.url) for server in self.pool.servers))
        return any(is_at_least(served, version) for served in held)

    async def read_version(self) -> int:
        """The version that a live server reports; the last known one if it reports none."""
        server = next(iter(self.pool.live), self.pool.servers[0])
        version = await read_version(server.request_headers, server.url)
        self._version_read_at = time.monotonic()
        if version is not None and self.pool.restarts is None:  # one that was restarted has an older one
            self.version = version
        return self.version

    def record_push(self, version: str | int | None, *, lost: Sequence[str]) -> None:
        """Record that the servers serve `version` now, and drain those at the `lost` URLs."""
        number = version_number(version)
        if number is not None:
            self.version, self._version_read_at = number, time.monotonic()
        self.pool.drain_lost(lost)

    async def _probe(self, server: Server) -> None:
        """Sample one token. Raises InferenceError if that fails, or if the server came back with
        older weights."""
        await server.probe(COMPLETIONS, {"model": next(iter(self.context_lengths), ""), "prompt": [[0]], "max_tokens": 1})
        if self.pool.restarts is not None:
            served = await read_served(server.request_headers, server.url)
            if not is_at_least(served, self.version):
                raise StaleWeightsError(f"it serves version {served} of the weights and not {self.version}")
            return
        version = await read_version(server.request_headers, server.url)
        if self.version and (version is None or version < self.version):
            raise InferenceError(f"it serves version {version} of the weights and not {self.version}; push to it first")
