"""What is asked of vLLM servers beside completions: whether they are healthy, what they serve,
and which version of the weights."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ludic.errors import ConfigError, InferenceError, ServerTimeoutError, ServerUnreachableError
from ludic.inference.servers.answers import ModelList, WeightInfo
from ludic.inference.servers.http import Answer, BlockingHttp, Http
from ludic.inference.servers.server_secret import secret_headers
from ludic.inference.servers.weight_versions import served_version

HEALTH_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 2.0
MODELS_TIMEOUT_S = 30.0
VERSION_TIMEOUT_S = 2.0
RESET_TIMEOUT_S = 60.0
MAX_SMALL_BYTES = 16 * 2**20
"""Of an answer without tokens. The metrics of a server with hundreds of series are 1 MB."""
TOKEN_COUNTERS = ("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{")


class HealthTimeoutError(ServerUnreachableError):
    """A server that did not become healthy in time."""


class _RuntimeVersion(Struct, rename={"weight_version": "version"}):
    weight_version: str | int | None


VERSION_ENDPOINTS: tuple[tuple[str, type[WeightInfo | _RuntimeVersion]], ...] = (
    ("/weight_info", WeightInfo),
    ("/runtime_version", _RuntimeVersion),
)
"""vLLM's own, and that of older servers."""


def server_url(address: str, port: int | None = None) -> str:
    """The root of a server, from a URL or from a host and a port. 0.0.0.0 is an address to
    listen on; called, it is this machine."""
    if port is not None:
        return f"http://{'127.0.0.1' if address in ('0.0.0.0', '::', '') else address}:{port}"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"urls has {address!r}, which must begin with http:// or https://, such as http://127.0.0.1:8000")
    return address.rstrip("/").removesuffix("/v1")


async def first_look(headers: Mapping[str, str], urls: Sequence[str], timeout_s: float) -> tuple[dict[str, int], int]:
    """Wait until every server is healthy; the context lengths of the first one's models and the
    version of its weights, 0 where it says none. HealthTimeoutError where all that is not over
    within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    await _wait_until_healthy(headers, urls, deadline, timeout_s)
    try:
        lengths = await read_context_lengths(headers, urls[0], timeout_s=_left_s(deadline, MODELS_TIMEOUT_S))
    except ServerTimeoutError as error:
        raise _health_timeout(f"{urls[0]}/v1/models did not answer within {timeout_s} s, although its /health did") from error
    return lengths, await read_version(headers, urls[0], timeout_s=_left_s(deadline, VERSION_TIMEOUT_S)) or 0


async def _wait_until_healthy(headers: Mapping[str, str], urls: Sequence[str], deadline: float, timeout_s: float) -> None:
    for url in urls:
        while not await _is_healthy(headers, url, _left_s(deadline, HEALTH_TIMEOUT_S)):
            if time.monotonic() >= deadline:
                raise _health_timeout(
                    f"{url}/health did not answer within {timeout_s} s; start a server there (`ludic serve`), or give its host and port"
                )
            await asyncio.sleep(_left_s(deadline, HEALTH_INTERVAL_S))


async def read_context_lengths(headers: Mapping[str, str], url: str, *, timeout_s: float = MODELS_TIMEOUT_S) -> dict[str, int]:
    """Model -> tokens of prompt and answer together; a server of another kind says nothing.
    Raises ServerTimeoutError."""
    try:
        listed = (await _get(headers, f"{url}/v1/models", timeout_s=timeout_s)).checked().read(ModelList).data
    except ServerTimeoutError:
        raise
    except InferenceError:
        return {}
    return {model.id: model.max_model_len for model in listed if model.max_model_len is not None}


async def read_version(headers: Mapping[str, str], url: str, *, timeout_s: float = VERSION_TIMEOUT_S) -> int | None:
    """The number of the weights; None where the server does not say one in time, or says a name."""
    deadline = time.monotonic() + timeout_s
    for path, kind in VERSION_ENDPOINTS:
        left_s = _left_s(deadline, timeout_s)
        try:
            answer = await _get(headers, f"{url}{path}", timeout_s=left_s)
            if answer.status == 200:
                return served_version(answer.read(kind).weight_version, url)
        except InferenceError:  # whatever it is, the version is not known
            return None
    return None


async def read_progress(headers: Mapping[str, str], url: str) -> float | None:
    """Tokens that the server has read and sampled so far: a number that rises while it works.
    None where it does not say, asked once."""
    try:
        answer = await _get(headers, f"{url}/metrics", timeout_s=VERSION_TIMEOUT_S)
        lines = answer.text.splitlines() if answer.status == 200 else []
        counts = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(TOKEN_COUNTERS)]
    except (InferenceError, ValueError, IndexError):
        return None
    return sum(counts) if counts else None


def reset_prefix_cache(http: BlockingHttp, url: str) -> None:
    """Make a server forget what it computed of earlier prompts. Raises InferenceError where that
    fails."""
    answer = http.ask(
        "POST",
        f"{url}/reset_prefix_cache",
        headers=secret_headers(url),
        timeout_s=RESET_TIMEOUT_S,
        max_bytes=MAX_SMALL_BYTES,
    )
    if answer.status != 200:
        raise InferenceError(f"{url} answered {answer.status} to /reset_prefix_cache; it must run with VLLM_SERVER_DEV_MODE=1")


async def _is_healthy(headers: Mapping[str, str], url: str, timeout_s: float) -> bool:
    try:
        return (await _get(headers, f"{url}/health", timeout_s=timeout_s)).status == 200
    except InferenceError:
        return False


async def _get(headers: Mapping[str, str], url: str, *, timeout_s: float) -> Answer:
    """Over a connection of its own: these are asked from whatever loop runs, and seldom."""
    async with Http(headers, keepalive_s=0.0) as http:
        return await http.ask("GET", url, timeout_s=timeout_s, max_bytes=MAX_SMALL_BYTES)


def _left_s(deadline: float, most: float) -> float:
    return max(0.0, min(most, deadline - time.monotonic()))


def _health_timeout(message: str) -> HealthTimeoutError:
    """For a caller who has the requests package a `requests.ConnectionError` too: what this
    library used, code may catch."""
    requests = sys.modules.get("requests")
    if requests is None:
        return HealthTimeoutError(message)
    return type("HealthTimeoutError", (HealthTimeoutError, requests.ConnectionError), {})(message)
