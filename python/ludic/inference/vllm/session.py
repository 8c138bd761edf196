"""What is asked of vLLM servers outside an event loop: whether they are healthy, what they serve, and which version of the weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from ludic.errors import ConfigError, InferenceError, ServerUnreachableError
from ludic.inference.servers.openai_client import is_loopback
from ludic.inference.servers.server_secret import secret_headers
from ludic.inference.servers.weight_versions import version_number

HEALTH_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 2.0
MODELS_TIMEOUT_S = 30.0
VERSION_TIMEOUT_S = 2.0
RESET_TIMEOUT_S = 60.0
VERSION_ENDPOINTS = (("/weight_info", "weight_version"), ("/runtime_version", "version"))
"""vLLM's own, and that of older servers."""
TOKEN_COUNTERS = ("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{")


class HealthTimeoutError(ServerUnreachableError, requests.ConnectionError):
    """A server that did not become healthy in time."""


def server_url(address: str, port: int | None = None) -> str:
    """The root of a server, from a URL or from a host and a port. 0.0.0.0 is an address to listen on; called, it is this machine."""
    if port is not None:
        return f"http://{'127.0.0.1' if address in ('0.0.0.0', '::', '') else address}:{port}"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"urls has {address!r}, which must begin with http:// or https://, such as http://127.0.0.1:8000")
    return address.rstrip("/").removesuffix("/v1")


def open_session(urls: Sequence[str], api_key: str, headers: Mapping[str, str]) -> requests.Session:
    """Only connections are tried again, never what was sent; no proxy is asked for this machine."""
    session = requests.Session()
    adapter = HTTPAdapter(pool_connections=10, pool_maxsize=10, max_retries=3)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    session.trust_env = not all(map(is_loopback, urls))
    session.headers.update({"Authorization": f"Bearer {api_key}", **headers})
    return session


def wait_until_healthy(session: requests.Session, urls: Sequence[str], timeout_s: float) -> None:
    """Return when every server is healthy; HealthTimeoutError, which is a requests.ConnectionError too, when one is not in time."""
    deadline = time.monotonic() + timeout_s
    for url in urls:
        while not _is_healthy(session, url):
            left = deadline - time.monotonic()
            if left <= 0:
                raise HealthTimeoutError(
                    f"{url}/health did not answer within {timeout_s} s; start a server there (`ludic serve`), or give its host and port"
                )
            time.sleep(min(HEALTH_INTERVAL_S, left))


def read_context_lengths(session: requests.Session, url: str) -> dict[str, int]:
    """Model -> tokens of prompt and answer together; a server of another kind says nothing."""
    with contextlib.suppress(requests.RequestException, ValueError):
        listed = session.get(f"{url}/v1/models", timeout=MODELS_TIMEOUT_S).json().get("data") or []
        return {str(model["id"]): model["max_model_len"] for model in listed if isinstance(model.get("max_model_len"), int)}
    return {}


def read_version(session: Any, url: str) -> int | None:
    """The number of the weights; None where the server does not say one, or says a name."""
    for path, key in VERSION_ENDPOINTS:
        try:
            answer = session.get(f"{url}{path}", timeout=VERSION_TIMEOUT_S)
            if answer.status_code == 200:
                return version_number(answer.json().get(key))
        except Exception:  # whatever it is, the version is not known
            return None
    return None


def reset_prefix_cache(session: Any, url: str) -> None:
    """Make a server forget what it computed of earlier prompts. Raises InferenceError where that fails."""
    try:
        answer = session.post(f"{url}/reset_prefix_cache", timeout=RESET_TIMEOUT_S, headers=secret_headers(url))
    except requests.RequestException as error:
        raise ServerUnreachableError(f"{url} could not reset its prefix cache: {error}") from error
    if answer.status_code != 200:
        raise InferenceError(
            f"{url} answered {answer.status_code} to /reset_prefix_cache; it must run with VLLM_SERVER_DEV_MODE=1"
        )


def read_progress(url: str) -> float | None:
    """Tokens that the server has read and sampled so far: a number that rises while it works. None where it does not say, asked once."""
    try:
        with requests.Session() as once:
            once.trust_env = not is_loopback(url)
            answer = once.get(f"{url}/metrics", timeout=VERSION_TIMEOUT_S)
        lines = answer.text.splitlines() if answer.status_code == 200 else []
        counts = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(TOKEN_COUNTERS)]
    except (requests.RequestException, ValueError):
        return None
    return sum(counts) if counts else None


def _is_healthy(session: requests.Session, url: str) -> bool:
    try:
        return session.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S).status_code == 200
    except requests.RequestException:
        return False
