"""Queries to vLLM servers other than completions: health, models, weight version, progress."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ludic.errors import ConfigError, EngineDeadError, InferenceError, ServerTimeoutError, ServerUnreachableError
from ludic.inference.servers.answers import ModelList, WeightInfo, check_served_version
from ludic.inference.servers.http import BlockingHttp, HttpResponse, request_once
from ludic.inference.servers.server_secret import secret_headers

HEALTH_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 2.0
MODELS_TIMEOUT_S = 30.0
VERSION_TIMEOUT_S = 2.0
RESET_TIMEOUT_S = 60.0
MAX_SMALL_BYTES = 16 * 2**20
"""Limit on a response without tokens. The metrics of a server with hundreds of series are 1 MB."""
TOKEN_COUNTERS = ("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{")


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
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"the URL {address!r} must begin with http:// or https://, such as http://127.0.0.1:8000")
    return address.rstrip("/").removesuffix("/v1")


async def wait_for_servers(headers: Mapping[str, str], urls: Sequence[str], timeout_s: float) -> tuple[dict[str, int], int]:
    """Wait until every server is healthy. Returns the context lengths of the first server's models
    and its weight version, 0 if it reports none. Raises HealthTimeoutError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for url in urls:

        async def is_healthy(url: str = url) -> bool:
            return await _is_healthy(headers, url, _remaining_s(deadline, HEALTH_TIMEOUT_S))

        if not await poll_until(is_healthy, deadline=deadline, interval_s=HEALTH_INTERVAL_S):
            raise _health_timeout(
                f"{url}/health did not answer within {timeout_s} s; start a server there (`ludic serve`), or pass its host and port"
            )
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
    try:
        response = await _request(headers, "GET", f"{url}/metrics", timeout_s=VERSION_TIMEOUT_S)
        lines = response.text.splitlines() if response.status == 200 else []
        counts = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(TOKEN_COUNTERS)]
    except (InferenceError, ValueError, IndexError):
        return None
    return sum(counts) if counts else None


def reset_prefix_cache(headers: Mapping[str, str], url: str) -> None:
    """Empty a server's prefix cache. Raises InferenceError if that fails."""
    response = BlockingHttp(headers).request(
        "POST",
        f"{url}/reset_prefix_cache",
        headers=secret_headers(url),
        timeout_s=RESET_TIMEOUT_S,
        max_bytes=MAX_SMALL_BYTES,
    )
    if response.status != 200:
        raise InferenceError(f"{url} answered {response.status} to /reset_prefix_cache; it must run with VLLM_SERVER_DEV_MODE=1")


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
