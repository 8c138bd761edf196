"""HTTP requests with one deadline for the whole exchange, a limit on the body, and no redirects.

`Http` is for asynchronous code that reuses its connections, `request_once` for a single request,
and `BlockingHttp` for synchronous code. The deadline covers name resolution, connecting, sending
and every byte of the response, so slow servers are given up in time as well as silent ones. Bodies
are never decompressed. Redirects are not followed, because requests carry prompts and keys.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Required, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

import msgspec

from ludic.errors import ConfigError, ConfigTypeError, InferenceError, ServerTimeoutError, ServerUnreachableError
from ludic.inference.servers.errors import quote_body, status_error
from ludic.inference.servers.loop_thread import run_blocking
from ludic.inference.servers.server_secret import is_loopback_host

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
            raise InferenceError(
                f"{self.url} answered {self.excerpt()}, which does not have the expected form: {error}"
            ) from error
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
    params: Mapping[str, str] | None
    headers: Mapping[str, str] | None
    timeout_s: Required[float]
    max_bytes: int


class Http:
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
        content = None if json is None else _encode(json, url)
        all_headers = {**self.headers, **_lower_names(headers), "accept-encoding": "identity"}
        all_headers |= {"content-type": "application/json"} if content is not None else {}
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

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

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


def _check_address(url: str, headers: Mapping[str, str]) -> None:
    """Raise ConfigError for a port beyond 65535, brackets without a valid address, or a header that
    is not ASCII."""
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from error
    for name, value in headers.items():
        if not (name.isascii() and value.isascii()):
            raise ConfigError(f"the header {name!r} for {url} must be ASCII, name and value; percent-encode what is not")


def _lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Lower-case the names, because two spellings of one header would both be sent."""
    return {name.lower(): value for name, value in headers.items()}


def is_loopback_url(url: str) -> bool:
    """Whether a URL is on this machine."""
    return is_loopback_host(urlsplit(url).hostname or "")


def is_refused(error: ServerUnreachableError) -> bool:
    """Whether nobody listens at the address, so that whoever served there has ended. A connection
    that broke, or was not accepted in time, says nothing of that."""
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
        raise InferenceError(
            f"{url} answered in the encoding {encoding[:40]!r}; no encoding was requested, and none is accepted: a small body can "
            "decompress to one that fills the memory"
        )
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
