"""How servers are asked, whatever for: one deadline for a whole exchange, a limit on the body, no
redirects.

`Http` is for code that awaits and keeps its connections, `BlockingHttp` for code that cannot await.
The deadline covers finding the address, connecting, sending and every byte of the answer, so that a
server which drips is left in time, as is one that is silent. Bodies are taken as they come over the
wire: none is decompressed. Where a server sends us elsewhere, nobody follows: what is sent has
prompts and keys.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from ludic.errors import ConfigError, ConfigTypeError, InferenceError, ServerTimeoutError, ServerUnreachableError
from ludic.inference.servers.errors import refusal
from ludic.inference.servers.loop_thread import run_blocking

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

T = TypeVar("T")

CONNECT_TIMEOUT_S = 30.0
CONNECTIONS = 1000
KEEPALIVE_S = 2.0
"""How long an idle connection is used again. Servers close theirs after 5 s, some of them just
as the next request is on its way."""
MAX_BYTES = 256 * 2**20
"""Of an answer. A million tokens with their log-probabilities take about 130 MB."""
SHOWN = 400
"""Characters of a body that errors quote."""


@dataclass(frozen=True)
class Answer:
    """What a server said. Example: `Answer(url, 200, b'{"data": []}').json() == {"data": []}`."""

    url: str
    status: int
    body: bytes = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Names are lower case."""

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")

    def checked(self) -> Answer:
        """Itself with a status of 2xx. Otherwise raises what the status means: EngineDeadError,
        BusyError or ServerError."""
        if 200 <= self.status < 300:
            return self
        raise refusal(self.url, self.status, self.text, self.headers)

    def json(self) -> Any:
        """The body as JSON, whatever it holds. Raises InferenceError where it is none."""
        return self.read(object)

    def read(self, kind: type[T]) -> T:
        """The body as JSON of this type, of which nothing is converted: 10.5, true and "7" are
        no int. Raises InferenceError."""
        try:
            decoded: T = _decoder(kind).decode(self.body)
        except msgspec.ValidationError as error:
            raise InferenceError(f"{self.url} answered {self.quoted()}, which is not what it must be: {error}") from error
        except (ValueError, RecursionError) as error:
            broken = any(word in self.body for word in (b"NaN", b"Infinity"))
            cause = "numbers that are not finite; check the server's weights" if broken else "is this the right address?"
            raise InferenceError(f"{self.url} answered {self.quoted()}, which is no JSON ({error}): {cause}") from error
        return decoded

    def quoted(self) -> str:
        """The beginning of the body, for a message."""
        said = " ".join(self.body[: 4 * SHOWN].decode("utf-8", errors="replace").split())
        return said[:SHOWN] or "nothing"


class Http:
    """Connections of one event loop, to any number of servers.

    >>> async with Http({"Authorization": "Bearer local"}) as http:
    ...     answer = await http.ask("GET", "http://127.0.0.1:8000/v1/models", timeout_s=30.0)
    """

    def __init__(self, headers: Mapping[str, str] | None = None, *, keepalive_s: float = KEEPALIVE_S) -> None:
        """`headers` go with everything that is asked. `keepalive_s` of 0 opens a connection for
        each call."""
        self.headers = _lower(headers or {})
        self._keepalive_s = keepalive_s
        self._clients: dict[tuple[bool, bool], AsyncClient] = {}
        """By whether the server is on this machine, and whether it is asked over TLS."""

    async def ask(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        max_bytes: int = MAX_BYTES,
    ) -> Answer:
        """What the server says within `timeout_s`, whatever its status.

        Raises ServerTimeoutError at the deadline, ServerUnreachableError where nobody is there or
        the connection breaks, and InferenceError for a body that is longer than `max_bytes` or
        compressed. ConfigError for a URL or a header that is none.
        """
        import httpx2

        _check_address(url, {**self.headers, **(headers or {})})
        content = None if json is None else _encoded(json, url)
        sent = {**self.headers, **_lower(headers or {}), "accept-encoding": "identity"}
        sent |= {"content-type": "application/json"} if content is not None else {}
        sent |= {"connection": "close"} if not self._keepalive_s else {}
        connecting = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client(url).stream(
                    method, url, content=content, params=params, headers=sent, timeout=connecting
                ) as response,
            ):
                return Answer(url, response.status_code, await _body(response, url, max_bytes), dict(response.headers))
        except TimeoutError as error:
            raise ServerTimeoutError(f"{url} gave no answer within {timeout_s:g} s") from error
        except httpx2.TransportError as error:
            said = " ".join(filter(None, [type(error).__name__, str(error)]))
            raise ServerUnreachableError(f"{url} cannot be reached ({said}); is the server running there?") from error
        except httpx2.InvalidURL as error:
            raise ConfigError(f"{url!r} is no URL: {error}") from error

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
        """No proxy of the environment leads to this machine."""
        import httpx2

        here, secure = kind = is_loopback(url), url.startswith("https://")
        if kind not in self._clients:
            limits = httpx2.Limits(
                max_connections=CONNECTIONS,
                max_keepalive_connections=CONNECTIONS if self._keepalive_s else 0,
                keepalive_expiry=self._keepalive_s,
            )
            certificates = _certificates() if secure or not here else _no_certificates()
            self._clients[kind] = httpx2.AsyncClient(limits=limits, trust_env=not here, verify=certificates)
        return self._clients[kind]


class BlockingHttp:
    """`Http` for code that cannot await, each call over a connection of its own. It may be
    called where an event loop runs."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        """`headers` go with everything that is asked."""
        self.headers = dict(headers or {})

    def ask(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        max_bytes: int = MAX_BYTES,
    ) -> Answer:
        """As `Http.ask`."""

        async def once() -> Answer:
            async with Http(self.headers, keepalive_s=0.0) as http:
                return await http.ask(
                    method, url, json=json, params=params, headers=headers, timeout_s=timeout_s, max_bytes=max_bytes
                )

        return run_blocking(once())


def _check_address(url: str, headers: Mapping[str, str]) -> None:
    """Raise ConfigError for what could not be sent: a port beyond 65535, brackets that are no
    address, a header that is not ASCII."""
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}") from error
    for name, value in headers.items():
        if not (name.isascii() and value.isascii()):
            raise ConfigError(f"the header {name!r} for {url} must be ASCII, name and value; percent-encode what is not")


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    """Names of headers have no case; two spellings of one would both be sent."""
    return {name.lower(): value for name, value in headers.items()}


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _body(response: Response, url: str, max_bytes: int) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise InferenceError(
            f"{url} answered in the encoding {encoding[:40]!r}; none was asked for, and none is taken: a small body may decode to one "
            "that fills the memory"
        )
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise InferenceError(f"{url} answered with more than {max_bytes} bytes and was left; is this the right address?")
    return bytes(body)


def _encoded(body: Any, url: str) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigTypeError(f"what is to be sent to {url} cannot be written as JSON: {error}") from error


_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(msgspec.json.Decoder)


@functools.cache
def _certificates() -> ssl.SSLContext:
    import httpx2

    return httpx2.create_ssl_context()


@functools.cache
def _no_certificates() -> ssl.SSLContext:
    """For connections that need none: the system's take a while to load."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
