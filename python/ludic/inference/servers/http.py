"""HTTP requests with one deadline for the whole exchange, a limit on the body, and no redirects.

`Http` is for asynchronous code that reuses its connections, `request_once` for a single request,
and `BlockingHttp` for synchronous code. The deadline covers name resolution, connecting, sending
and every byte of the response, so slow servers are given up in time as well as silent ones. Bodies
are never decompressed. Redirects are not followed, because requests carry prompts and keys.

Runs coroutines for synchronous code, on one event loop in its own thread.

Unlike `asyncio.run`, this also works inside a running event loop, and deadlines also end calls that
wait for another thread, such as name resolution.
"""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Required, Self, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

import msgspec

from ludic.errors import ConfigError, ConfigTypeError, InferenceError, ServerError, ServerTimeoutError, ServerUnreachableError
from ludic.inference.servers.errors import quote_body, status_error
from ludic.inference.servers.server_secret import secret_headers
from ludic.inference.vllm.in_server.secret import is_loopback_host

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

T = TypeVar("T")

CONNECT_TIMEOUT_S = 30.0
CONNECTIONS = 1000
KEEPALIVE_S = 2.0
"""How long an idle connection is reused. Servers close theirs after 5 s, some of them just as the
next request arrives."""
MAX_BYTES = 256 * 2**20
"""Limit on a response. A million tokens with their log-probabilities take about 130 MB."""
QUOTED_BYTES = 2000
"""Bytes of a body that are decoded for an error message."""


@dataclass(frozen=True)
class HttpResponse:
    """A response with its whole body. Example: `HttpResponse(url, 200, b'{"data": []}').json() ==
    {"data": []}`."""

    url: str
    status: int
    body: bytes = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Names are lower case."""

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")

    def raise_for_status(self) -> HttpResponse:
        """Return itself if the status is 2xx; otherwise raise EngineDeadError, BusyError or
        ServerError."""
        if 200 <= self.status < 300:
            return self
        raise status_error(self.url, self.status, self.text, self.headers)

    def json(self) -> Any:
        """The body as JSON of any type. Raises InferenceError if it is not JSON."""
        return self.read(object)

    def read(self, kind: type[T]) -> T:
        """The body as JSON of this type, without conversions: 10.5, true and "7" are not ints.
        Raises InferenceError."""
        try:
            decoded: T = _decoder(kind).decode(self.body)
        except msgspec.ValidationError as error:
            raise InferenceError(f"{self.url} answered {self.excerpt()}, not the expected form: {error}") from error
        except (ValueError, RecursionError) as error:
            broken = any(word in self.body for word in (b"NaN", b"Infinity"))
            cause = "numbers that are not finite; check the server's weights" if broken else "is this the right address?"
            raise InferenceError(f"{self.url} answered {self.excerpt()}, which is not JSON ({error}): {cause}") from error
        return decoded

    def excerpt(self) -> str:
        """The beginning of the body, for an error message."""
        return quote_body(self.body[:QUOTED_BYTES].decode("utf-8", errors="replace"))


class RequestOptions(TypedDict, total=False):
    """Keywords of `Http.request`."""

    json: Any
    content: bytes | None
    params: Mapping[str, str] | None
    headers: Mapping[str, str] | None
    timeout_s: Required[float]
    max_bytes: int


class AsyncClosing(ABC):
    """An asynchronous context manager that closes the connections at its end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections of the running event loop."""


class Http(AsyncClosing):
    """Connections of one event loop, to any number of servers.

    >>> async with Http({"Authorization": "Bearer local"}) as http:
    ...     answer = await http.request("GET", "http://127.0.0.1:8000/v1/models", timeout_s=30.0)
    """

    def __init__(self, headers: Mapping[str, str] | None = None, *, keepalive_s: float = KEEPALIVE_S) -> None:
        """`headers` are sent with every request. `keepalive_s=0` opens a new connection for each
        request."""
        self.headers = _lower_names(headers or {})
        self._keepalive_s = keepalive_s
        self._clients: dict[tuple[bool, bool], AsyncClient] = {}
        """Keyed by (server is on this machine, TLS)."""

    async def request(self, method: str, url: str, **options: Unpack[RequestOptions]) -> HttpResponse:
        """The response within `timeout_s`, whatever its status.

        Raises ServerTimeoutError at the deadline, ServerUnreachableError if connecting fails or the
        connection breaks, InferenceError for a body that is compressed or longer than `max_bytes`,
        and ConfigError for an invalid URL or header.
        """
        import httpx2

        json, timeout_s, headers = options.get("json"), options["timeout_s"], options.get("headers") or {}
        _check_address(url, {**self.headers, **headers})
        content, kind = (options.get("content"), "octet-stream") if json is None else (_encode(json, url), "json")
        all_headers = {**self.headers, **_lower_names(headers), "accept-encoding": "identity"}
        all_headers |= {"content-type": f"application/{kind}"} if content is not None else {}
        all_headers |= {"connection": "close"} if not self._keepalive_s else {}
        connect_timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client(url).stream(
                    method, url, content=content, params=options.get("params"), headers=all_headers, timeout=connect_timeout
                ) as response,
            ):
                body = await _read_body(response, url, options.get("max_bytes", MAX_BYTES))
                return HttpResponse(url, response.status_code, body, dict(response.headers))
        except TimeoutError as error:
            raise ServerTimeoutError(f"{url} gave no answer within {timeout_s:g} s") from error
        except httpx2.TransportError as error:
            reason = " ".join(filter(None, [type(error).__name__, str(error)]))
            raise ServerUnreachableError(f"{url} cannot be reached ({reason}); is the server running there?") from error
        except httpx2.InvalidURL as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    def _client(self, url: str) -> AsyncClient:
        """The connections for a URL. Proxies from the environment are not used for this machine."""
        import httpx2

        is_local, secure = key = is_loopback_url(url), url.startswith("https://")
        if key not in self._clients:
            limits = httpx2.Limits(
                max_connections=CONNECTIONS,
                max_keepalive_connections=CONNECTIONS if self._keepalive_s else 0,
                keepalive_expiry=self._keepalive_s,
            )
            certificates = _load_certificates() if secure or not is_local else _make_plain_context()
            self._clients[key] = httpx2.AsyncClient(limits=limits, trust_env=not is_local, verify=certificates)
        return self._clients[key]


async def request_once(method: str, url: str, **options: Unpack[RequestOptions]) -> HttpResponse:
    """`Http.request` over a new connection, which is closed afterwards."""
    async with Http(keepalive_s=0.0) as http:
        return await http.request(method, url, **options)


class BlockingHttp:
    """`Http` for synchronous code. Opens a new connection for each request. Also works in a thread
    that runs an event loop."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        """`headers` are sent with every request."""
        self.headers = _lower_names(headers or {})

    def request(self, method: str, url: str, **options: Unpack[RequestOptions]) -> HttpResponse:
        """Like `Http.request`."""
        options["headers"] = {**self.headers, **_lower_names(options.get("headers") or {})}
        return run_blocking(request_once(method, url, **options))


def check_scheme(name: str, url: str) -> None:
    """Raise ConfigError for an address without http:// or https://; `name` is the setting's."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{name} ({url}) must begin with http:// or https://, such as http://127.0.0.1:8000")


def _check_address(url: str, headers: Mapping[str, str]) -> None:
    """Raise ConfigError for a port beyond 65535, brackets without a valid address, or a header that
    is not ASCII."""
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from error
    for name, value in headers.items():
        if not (name.isascii() and value.isascii()):
            raise ConfigError(f"the header {name!r} for {url} must be ASCII, name and value; percent-encode other characters")


def _lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Lower-case the names, because two spellings of one header would both be sent."""
    return {name.lower(): value for name, value in headers.items()}


def is_loopback_url(url: str) -> bool:
    """Whether a URL is on this machine."""
    return is_loopback_host(urlsplit(url).hostname or "")


def is_refused(error: ServerUnreachableError) -> bool:
    """Whether no process listens at the address, so that the server there has ended. A connection
    that broke, or was not accepted in time, does not say so."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        if isinstance(cause, BaseExceptionGroup):  # a name with several addresses
            return all(isinstance(each, ConnectionRefusedError) for each in cause.exceptions)
        cause = cause.__cause__ or cause.__context__
    return False


async def _read_body(response: Response, url: str, max_bytes: int) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise InferenceError(f"{url} answered in the encoding {encoding[:40]!r}; answers must have no content encoding")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise InferenceError(f"{url} answered with more than {max_bytes} bytes; is this the right address?")
    return bytes(body)


def _encode(body: Any, url: str) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigTypeError(f"the request to {url} cannot be written as JSON: {error}") from error


_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(msgspec.json.Decoder)


@functools.cache
def _load_certificates() -> ssl.SSLContext:
    import httpx2

    return httpx2.create_ssl_context()


@functools.cache
def _make_plain_context() -> ssl.SSLContext:
    """For connections without TLS: loading the system's certificates takes a while."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


_loop: asyncio.AbstractEventLoop | None = None
"""It runs in a daemon thread, which is started at the first call."""
_loop_lock = threading.Lock()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, which must have its own deadline, from synchronous code. It is cancelled
    when this thread is interrupted, for example by Ctrl-C."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ludic-http", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(coroutine, _loop)
    try:
        return future.result()
    finally:
        future.cancel()  # changes nothing if it has ended


def _reset_in_fork() -> None:
    """Start a new thread in a forked process: a fork copies the loop but not its thread."""
    global _loop, _loop_lock
    _loop, _loop_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_in_fork)

QUICK_TIMEOUT_S = 30.0
"""For calls that do not move weights."""


class ServerCalls:
    """Calls to one server. Subclasses add a method for each endpoint."""

    hint = ""
    """How to start a server that has the endpoints; shown when one is missing."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = QUICK_TIMEOUT_S) -> None:
        """`headers` are sent with every call."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self.ends_at: float | None = None
        """The time of `time.monotonic()` at which every call ends, whatever its own timeout."""
        self._http = BlockingHttp(headers)

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        answer: type[T] | None = None,
    ) -> T:
        """Make a call, with a body of JSON or `content`, and return the response as JSON of the
        type `answer`. Without a type, return any JSON, or the text if it is not JSON.

        Raises ServerError, ServerTimeoutError and ServerUnreachableError, and InferenceError for
        JSON of another type.
        """
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        if self.ends_at is not None:
            deadline_s = min(deadline_s, self.ends_at - time.monotonic())
            if deadline_s <= 0:
                raise ServerTimeoutError(f"{self.url}{path} was not called: the time for this server is over")
        body = None if method == "get" or content is not None else dict(json or {})
        response = self._http.request(
            method.upper(),
            f"{self.url}{path}",
            json=body,
            content=content,
            params=params,
            headers=secret_headers(self.url),
            timeout_s=deadline_s,
        )
        if response.status != 200:
            hint = f"{self.hint}; " if response.status in (404, 405) and self.hint else ""
            message = f"{self.url}{path} answered {response.status}: {hint}it said {response.excerpt()}"
            raise ServerError(message, status=response.status, reason=response.text)
        if answer is not None:
            return response.read(answer)
        try:
            decoded: T = response.json()
            return decoded
        except InferenceError:
            return response.text  # type: ignore[return-value]


def convert_answer(payload: object, kind: type[T], url: str) -> T:
    """Convert decoded JSON from the server at `url` to a type. Raises InferenceError if it has
    another type."""
    try:
        return msgspec.convert(payload, kind)
    except msgspec.ValidationError as error:
        raise InferenceError(f"{url} answered {str(payload)[:200]}, which does not have the expected form: {error}") from error
