"""The vLLM servers behind one client: sends calls to them, tracks their weight version, and queries
their health, models, version and progress."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from ludic.errors import EngineDeadError, InferenceError, ServerError, ServerTimeoutError, ServerUnreachableError
from ludic.inference.servers.admission import read_metrics, sum_series
from ludic.inference.servers.answers import ModelList, WeightInfo, check_served_version, is_at_least, version_number
from ludic.inference.servers.errors import AbortedError, RetryPolicy, StaleWeightsError, is_missing_endpoint
from ludic.inference.servers.http import HttpResponse, check_scheme, request_once, run_blocking
from ludic.inference.servers.pool import ServerPool
from ludic.inference.servers.routing import Routing
from ludic.inference.servers.server import Server

T = TypeVar("T")

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
"""The first, which takes token ids, needs a server started with `--enable-scale-out`."""
VERSION_AGE_S = 1.0
"""How long a version that was read is used for requests to endpoints that do not report it."""
HEALTH_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 2.0
MODELS_TIMEOUT_S = 30.0
VERSION_TIMEOUT_S = 2.0
MAX_SMALL_BYTES = 16 * 2**20
"""Limit on a response without tokens."""
TOKEN_COUNTERS = {"vllm:prompt_tokens_total", "vllm:generation_tokens_total"}


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
        routing: Routing,
        max_kv_use: float | None,
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
            routing=routing,
            max_kv_use=max_kv_use,
        )
        self.request_headers = servers[0].request_headers
        """Sent with every request, the key included."""
        self.aborted = 0
        """Responses that the servers aborted."""
        self.context_lengths, self.version = run_blocking(wait_for_servers(self.request_headers, urls, connection_timeout_s))
        self._version_read_at = time.monotonic()
        self.served_names: dict[str, str] = {}
        """Requested model -> name of the adapter with its newest weights, such as `first@17`."""

    @property
    def name(self) -> str:
        """The servers' name in error messages."""
        return self.urls[0] if len(self.urls) == 1 else f"none of {len(self.urls)} servers"

    async def send(
        self, call: Callable[[Server], Awaitable[T]], *, reports_version: bool, prompt: Callable[[], Sequence[bytes]]
    ) -> tuple[T, int]:
        """Return what `call` returns at a live server, and the version served before it. Unless
        the response `reports_version`, that version is read first, at most once in
        `VERSION_AGE_S`. `prompt` makes the keys of the prompt."""

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
            return await self.pool.send(counting_aborts, prompt), version

        return await self._retries.run(attempt, name=self.name)

    async def ask_newest(self, server: Server, model: str, ask: Callable[[str], Awaitable[T]]) -> tuple[T, int | None]:
        """What `ask` returns for the name under which `model` is served, and an adapter's version.
        A server that has only later ones is asked for the latest; StaleWeightsError without any."""
        while True:
            name = self.served_names.get(model, model)
            run, _, number = name.rpartition("@")
            version = version_number(number)
            try:
                return await ask(name), None if name == model else version
            except ServerError as error:
                if name == model or error.status != 404 or is_missing_endpoint(error):
                    raise
                if not (later := await read_adapters(server.request_headers, server.url, run, (version or 0) + 1)):
                    raise StaleWeightsError(
                        f"{server.url} lacks adapter {name}: it was restarted, and waits for a push"
                    ) from error
                self.served_names[model] = f"{run}@{max(later)}"

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
            raise StaleWeightsError(f"{server.url} samples with version {stale[0]} of the weights, not with {least} or later")

    async def has_version(self, version: int, adapters: str = "") -> bool:
        """Whether a server has this version, or a later one. Of `adapters` it is used from then."""
        for server in self.pool.servers:
            if own := await read_adapters(server.request_headers, server.url, adapters, version):
                self.served_names[next(iter(self.context_lengths), "")] = f"{adapters}@{min(own)}"
                return True
        if self.served_names:
            return False
        held = await asyncio.gather(*(read_served(server.request_headers, server.url) for server in self.pool.servers))
        return any(is_at_least(served, version) for served in held)

    async def read_version(self) -> int:
        """The version that a live server reports; the last known one if it reports none, or serves
        adapters, whose names have it."""
        if self.served_names:
            return self.version
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
        self.pool.router.forget()
        self.pool.drain_lost(lost)

    async def _probe(self, server: Server) -> None:
        """Sample one token. Raises InferenceError if that fails, or if the server came back with
        older weights."""
        model = next(iter(self.context_lengths), "")
        await server.probe(COMPLETIONS, {"model": self.served_names.get(model, model), "prompt": [[0]], "max_tokens": 1})
        if self.served_names:
            return
        if self.pool.restarts is not None:
            served = await read_served(server.request_headers, server.url)
            if not is_at_least(served, self.version):
                raise StaleWeightsError(f"it serves version {served} of the weights and not {self.version}")
            return
        version = await read_version(server.request_headers, server.url)
        if self.version and (version is None or version < self.version):
            raise InferenceError(f"it serves version {version} of the weights and not {self.version}; push to it first")


class HealthTimeoutError(ServerUnreachableError):
    """A server did not become healthy in time."""


class _RuntimeVersion(Struct, rename={"weight_version": "version"}):
    weight_version: str | int | None


VERSION_ENDPOINTS: tuple[tuple[str, type[WeightInfo | _RuntimeVersion]], ...] = (
    ("/weight_info", WeightInfo),
    ("/runtime_version", _RuntimeVersion),
)
"""vLLM's own endpoint, and the endpoint of older servers."""


def server_url(address: str, port: int | None = None) -> str:
    """The root URL of a server, from a URL or from a host and a port. 0.0.0.0, which is only an
    address to listen on, becomes 127.0.0.1."""
    if port is not None:
        return f"http://{'127.0.0.1' if address in ('0.0.0.0', '::', '') else address}:{port}"
    check_scheme("the URL", address)
    return address.rstrip("/").removesuffix("/v1")


async def wait_for_servers(headers: Mapping[str, str], urls: Sequence[str], timeout_s: float) -> tuple[dict[str, int], int]:
    """Wait until every server is healthy. Returns the context lengths of the first server's models
    and its weight version, 0 if it reports none. Raises HealthTimeoutError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for url in urls:

        async def is_healthy(url: str = url) -> bool:
            return await _is_healthy(headers, url, _remaining_s(deadline, HEALTH_TIMEOUT_S))

        if not await poll_until(is_healthy, deadline=deadline, interval_s=HEALTH_INTERVAL_S):
            raise _health_timeout(f"{url}/health did not answer within {timeout_s} s; start a server there (`ludic serve`)")
    try:
        lengths = await read_context_lengths(headers, urls[0], timeout_s=_remaining_s(deadline, MODELS_TIMEOUT_S))
    except ServerTimeoutError as error:
        raise _health_timeout(f"{urls[0]}/v1/models did not answer within {timeout_s} s, although its /health did") from error
    return lengths, await read_version(headers, urls[0], timeout_s=_remaining_s(deadline, VERSION_TIMEOUT_S)) or 0


async def poll_until(condition: Callable[[], Awaitable[bool]], *, deadline: float, interval_s: float) -> bool:
    """Check a condition until it holds; returns False if the deadline passes first."""
    while not await condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_remaining_s(deadline, interval_s))
    return True


async def can_sample(url: str, deadline: float) -> bool:
    """Whether a server is healthy and samples a token; a server without models need only be
    healthy. Raises EngineDeadError if it is healthy but cannot sample."""
    if not await _is_healthy({}, url, _remaining_s(deadline, HEALTH_TIMEOUT_S)):
        return False
    try:
        response = await _request({}, "GET", f"{url}/v1/models", timeout_s=_remaining_s(deadline, MODELS_TIMEOUT_S))
        models = response.read(ModelList).data if response.status == 200 else []
        if not models:
            return True
        body = {"model": models[0].id, "prompt": [[0]], "max_tokens": 1, "temperature": 0, "logprobs": 0}
        response = await _request({}, "POST", f"{url}/v1/completions", json=body, timeout_s=_remaining_s(deadline, math.inf))
    except InferenceError:
        return False
    if response.status >= 500:
        raise EngineDeadError(f"the server at {url} is healthy and cannot sample: {response.status}: {response.excerpt()}")
    return True


async def read_context_lengths(headers: Mapping[str, str], url: str, *, timeout_s: float = MODELS_TIMEOUT_S) -> dict[str, int]:
    """Model -> prompt plus completion tokens; empty for servers that do not report it. Raises
    ServerTimeoutError."""
    try:
        response = await _request(headers, "GET", f"{url}/v1/models", timeout_s=timeout_s)
        models = response.raise_for_status().read(ModelList).data
    except ServerTimeoutError:
        raise
    except InferenceError:
        return {}
    return {model.id: model.max_model_len for model in models if model.max_model_len is not None}


async def read_adapters(headers: Mapping[str, str], url: str, run: str, least: int) -> list[int]:
    """The versions, from `least` on, of the run's adapters at a server that answers in time."""
    try:
        response = await _request(headers, "GET", f"{url}/v1/models", timeout_s=HEALTH_TIMEOUT_S)
        names = [model.id.rpartition("@") for model in response.raise_for_status().read(ModelList).data]
        return [int(number) for of, _, number in names if of == run and is_at_least(number, least)]
    except InferenceError:
        return []


async def read_version(headers: Mapping[str, str], url: str, *, timeout_s: float = VERSION_TIMEOUT_S) -> int | None:
    """The weight version; None if the server reports none in time, or one that is not a number."""
    deadline = time.monotonic() + timeout_s
    for path, kind in VERSION_ENDPOINTS:
        try:
            response = await _request(headers, "GET", f"{url}{path}", timeout_s=_remaining_s(deadline, timeout_s))
            if response.status == 200:
                return check_served_version(response.read(kind).weight_version, url)
        except InferenceError:  # the version is unknown, whatever the error
            return None
    return None


async def read_served(headers: Mapping[str, str], url: str, *, timeout_s: float = HEALTH_TIMEOUT_S) -> str | int | None:
    """The name of the weight version as the server gives it, `default` before the first push; None
    if it does not answer in time."""
    try:
        response = await _request(headers, "GET", f"{url}/weight_info", timeout_s=timeout_s)
        return response.raise_for_status().read(WeightInfo).weight_version
    except InferenceError:
        return None


async def read_progress(headers: Mapping[str, str], url: str) -> float | None:
    """Number of tokens that the server has processed so far, which rises while it works. None if
    the server does not report it."""
    metrics = await read_metrics(headers, url) or {}
    known = metrics.keys() & TOKEN_COUNTERS
    return sum_series(metrics, *known) if known else None


async def _is_healthy(headers: Mapping[str, str], url: str, timeout_s: float) -> bool:
    try:
        return (await _request(headers, "GET", f"{url}/health", timeout_s=timeout_s)).status == 200
    except InferenceError:
        return False


async def _request(headers: Mapping[str, str], method: str, url: str, *, timeout_s: float, json: Any = None) -> HttpResponse:
    """Uses a new connection for each request: queries are rare and come from any event loop."""
    return await request_once(method, url, headers=headers, json=json, timeout_s=timeout_s, max_bytes=MAX_SMALL_BYTES)


def _remaining_s(deadline: float, most: float) -> float:
    return max(0.0, min(most, deadline - time.monotonic()))


def _health_timeout(message: str) -> HealthTimeoutError:
    """The error is also a `requests.ConnectionError` if that package is loaded, because existing
    code may catch that type."""
    requests = sys.modules.get("requests")
    if requests is None:
        return HealthTimeoutError(message)
    return type("HealthTimeoutError", (HealthTimeoutError, requests.ConnectionError), {})(message)
