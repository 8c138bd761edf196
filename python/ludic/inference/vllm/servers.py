"""The vLLM servers behind one client: sends calls to them, tracks their weight version, and finds
the endpoint that takes token ids: `/inference/v1/generate` on a vLLM server started with
`--enable-scale-out`, else `/v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from ludic.errors import InferenceError, ServerError
from ludic.inference.servers.answers import is_at_least, version_number
from ludic.inference.servers.errors import AbortedError, RetryPolicy, StaleWeightsError, is_missing_endpoint
from ludic.inference.servers.http import BlockingHttp, HttpResponse, run_blocking
from ludic.inference.servers.pool import Restarts, Server, ServerPool
from ludic.inference.vllm.server_queries import (
    read_progress,
    read_served,
    read_version,
    reset_prefix_cache,
    wait_for_servers,
)

T = TypeVar("T")

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
        self.pool = ServerPool(servers, probe=self._probe, progress=self._read_progress, silence_s=silence_s)
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
        the response `reports_version`, that version is read first."""

        async def counting_aborts(server: Server) -> T:
            try:
                return await call(server)
            except AbortedError:
                self.aborted += 1
                raise

        async def attempt() -> tuple[T, int]:
            version = self.version if reports_version else await self._recent_version()
            return await self.pool.send(counting_aborts), version

        return await self._retries.run(attempt, name=self.name)

    def follow_restarts(self, restarts: Restarts) -> None:
        """Take answers only of versions that were published, and are no older than `version` was at
        the request. A server with others is drained until it has been given the newest."""
        self.pool.restarts = restarts

    def check_served(self, server: Server, spans: Sequence[Mapping[str, Any]], least: int) -> None:
        """Raise StaleWeightsError for an answer of another version than `follow_restarts` allows.

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

    def require_version(self, version: int) -> None:
        """Take answers of this version and later ones from now on."""
        self.version = version

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

    async def probe(self) -> dict[str, bool]:
        """Ask every server for one token. Returns whether each URL is alive."""
        return {server.url: await self.pool.probe(server) for server in self.pool.servers}

    def reset_prefix_cache(self) -> None:
        """Empty every server's prefix cache. Raises InferenceError if that fails."""
        for server in self.pool.servers:
            reset_prefix_cache(BlockingHttp(server.request_headers), server.url)

    async def _recent_version(self) -> int:
        """The current version or an older one, read at most once in `VERSION_AGE_S`."""
        if time.monotonic() - self._version_read_at > VERSION_AGE_S:
            self._version_read_at = time.monotonic()
            await self.read_version()
        return self.version

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

    async def _read_progress(self, server: Server) -> float | None:
        return await read_progress(server.request_headers, server.url)


GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"


class TokenEndpoints:
    """Finds out with the first request which endpoint each server has."""

    def __init__(self) -> None:
        self.without_generate: set[str] = set()
        """URLs of servers that have only `/v1/completions`, which does not report the weight
        version."""

    async def post(
        self, server: Server, generate: dict[str, Any], completions: dict[str, Any], headers: Mapping[str, str] | None
    ) -> HttpResponse:
        """Post the body that fits the server's endpoint: `generate` or `completions`, which are the
        same request. Raises InferenceError."""
        if server.url not in self.without_generate:
            try:
                return await server.post(GENERATE, generate, headers=headers)
            except ServerError as error:
                if not is_missing_endpoint(error):
                    raise
                self.without_generate.add(server.url)
        return await server.post(COMPLETIONS, completions, headers=headers)
