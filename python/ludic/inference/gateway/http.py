"""An HTTP/1.1 server on asyncio's streams and h11, for one handler of all requests.

It answers what reaches the gateway from programs that are not trusted: every header, body and
answer has a limit and a deadline, and no input ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11

HEADER_BYTES = 64 * 1024
BODY_BYTES = 32 * 2**20
HEADER_S = 10.0
"""From the first byte of a header to its end."""
BODY_S = 60.0
IDLE_S = 600.0
"""How long a connection may stay without a request."""
FIRST_S = 30.0
"""The same before its first request."""
CONNECTIONS, CONNECTIONS_OF_SOCKET = 2000, 128
"""At a time, by TCP and at each socket file."""
NOBODY = 65_534
"""The user of sandboxes if this process is root."""
PING_AFTER_S, PING_EVERY_S = 30.0, 3.0
"""A stream has its status from its first event on. If none comes within 30 s, a ping is sent, so
that errors before it have a status of their own."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """Without the query."""
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    key_hint: str = ""
    """The key of the session whose socket the request came through; empty for one of all."""


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True)
class Exchange:
    """A request that is being answered."""

    reply: asyncio.Future[Reply]
    ping: bytes | None = None
    """What a stream sends while it waits; None for a whole answer."""
    on_sent: Callable[[], None] = field(default=lambda: None)
    """Called when the reply goes out, before the client can react to it."""
    on_lost: Callable[[], None] = field(default=lambda: None)
    """Called if the client goes away before."""


Handler = Callable[[Request], Awaitable[Exchange]]


class HttpServer:
    """Serves one handler on any number of sockets, of TCP and of files. Belongs to the event loop
    that it is started on."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._servers: dict[str, asyncio.Server] = {}
        self._open: dict[str, set[asyncio.Task[None]]] = {}
        """Key of a socket file, or "" for TCP -> its connections."""

    async def listen(self, host: str, port: int) -> int:
        """Serve on a TCP port; 0 takes a free one. Returns the port."""
        server = await asyncio.start_server(self._accept(""), host, port, backlog=1024)
        self._servers[""] = server
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def listen_at(self, path: Path, key: str) -> None:
        """Serve on a socket file that only the owner of its folder can open, or the user nobody in
        the place of root. Its requests have `key_hint`."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        path.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        self._servers[key] = await asyncio.start_unix_server(self._accept(key), sock=listening)

    def stop_listening(self, key: str) -> None:
        """Close the socket file of a key, if there is one."""
        server = self._servers.pop(key, None)
        if server is not None:
            server.close()

    async def close(self) -> None:
        """Close all sockets and connections."""
        for key in list(self._servers):
            self.stop_listening(key)
        connections = [task for tasks in self._open.values() for task in tasks]
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, key: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            of_key = self._open.setdefault(key, set())
            if task is None or len(of_key) >= (CONNECTIONS_OF_SOCKET if key else CONNECTIONS):
                writer.close()
                return
            of_key.add(task)
            try:
                await _Connection(reader, writer, self._handler, key).serve()
            except (ConnectionError, TimeoutError, h11.ProtocolError, asyncio.CancelledError):
                pass  # the client's fault, or the server ends: nothing is left to say
            finally:
                of_key.discard(task)
                if not of_key:
                    self._open.pop(key, None)
                writer.close()

        return serve


class _Connection:
    """One connection, which is kept for several requests one after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler, key: str) -> None:
        self._reader, self._writer, self._handler, self._key = reader, writer, handler, key
        self._has_answered = False
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)

    async def serve(self) -> None:
        while True:
            try:
                request = await self._read_request()
            except h11.RemoteProtocolError as error:
                if self._http.our_state is h11.IDLE or self._http.our_state is h11.SEND_RESPONSE:
                    await self._write(Reply(error.error_status_hint, str(error).encode(), "text/plain"), close=True)
                return
            if request is None:
                return
            exchange = await self._handler(request)
            await self._answer(exchange)
            self._has_answered = True
            if self._http.our_state is h11.MUST_CLOSE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    async def _read_request(self) -> Request | None:
        """The next request; None at the end of the connection."""
        head: h11.Request | None = None
        body: list[bytes] = []
        size = 0
        deadline = asyncio.get_running_loop().time() + (IDLE_S if self._has_answered else min(FIRST_S, IDLE_S))
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    self._send(h11.InformationalResponse(status_code=100, headers=[]))
                started = head is None and bool(self._http.trailing_data[0])
                if started:
                    deadline = min(deadline, asyncio.get_running_loop().time() + HEADER_S)
                try:
                    async with asyncio.timeout_at(deadline):
                        self._http.receive_data(await self._reader.read(2**18))
                except TimeoutError:
                    if head is None and not started:
                        return None
                    raise h11.RemoteProtocolError("the request took too long", 408) from None
            elif isinstance(event, h11.Request):
                head, deadline = event, asyncio.get_running_loop().time() + BODY_S
                announced = dict(event.headers).get(b"content-length", b"0")
                if not announced.isdigit() or int(announced) > BODY_BYTES:
                    raise h11.RemoteProtocolError(f"a body may have {BODY_BYTES} bytes", 413)
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > BODY_BYTES:
                    raise h11.RemoteProtocolError(f"a body may have {BODY_BYTES} bytes", 413)
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
                path = head.target.decode("latin-1").partition("?")[0]
                return Request(head.method.decode("latin-1"), path, headers, b"".join(body), self._key)
            else:
                return None

    async def _answer(self, exchange: Exchange) -> None:
        """Send the reply when it is there. Raises ConnectionError if the client goes away first."""
        gone = asyncio.ensure_future(self._wait_until_gone())
        try:
            wait_s = None if exchange.ping is None else PING_AFTER_S
            while not exchange.reply.done():
                waiting: set[asyncio.Future[Any]] = {exchange.reply, gone}
                await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ConnectionError("the client has gone")
                if not exchange.reply.done() and exchange.ping is not None:
                    self._begin_stream(exchange.ping)
                    wait_s = PING_EVERY_S
            reply = exchange.reply.result()
            exchange.on_sent()
            if self._http.our_state is h11.SEND_BODY:  # a stream that has sent pings
                body = reply.body if reply.status < 400 else b"event: error\ndata: " + reply.body + b"\n\n"
                await self._end(body)
            else:
                await self._write(reply)
        except BaseException:
            exchange.reply.cancel()
            exchange.on_lost()
            raise
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await gone

    def _begin_stream(self, ping: bytes) -> None:
        if self._http.our_state is h11.SEND_RESPONSE:
            headers = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked"), ("cache-control", "no-cache")]
            self._send(h11.Response(status_code=200, headers=headers))
        self._send(h11.Data(data=ping))

    async def _wait_until_gone(self) -> None:
        """Return when the client closes the connection, or sends more than a request may have. What
        it sends before is kept for the next request."""
        received = 0
        while (data := await self._reader.read(2**16)) and received <= BODY_BYTES:
            received += len(data)
            self._http.receive_data(data)

    async def _write(self, reply: Reply, *, close: bool = False) -> None:
        headers = [("content-type", reply.content_type), ("content-length", str(len(reply.body)))]
        head = h11.Response(status_code=reply.status, headers=[*headers, *([("connection", "close")] if close else [])])
        await self._end(reply.body, head)

    def _send(self, *events: h11.Event) -> None:
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))

    async def _end(self, body: bytes, *head: h11.Event) -> None:
        self._send(*head, h11.Data(data=body), h11.EndOfMessage())
        async with asyncio.timeout(BODY_S):
            await self._writer.drain()
