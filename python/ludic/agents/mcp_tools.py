"""Tools of servers of the Model Context Protocol, through its official SDK: `mcp:COMMAND` starts a
server that speaks over its standard input and output, `mcp:URL` connects to one over HTTP.

A server is not trusted: its messages have a largest size, and every wait has a deadline. It gets
no environment variables of this process but PATH, HOME and the like; `mcp:env KEY=VALUE COMMAND`
gives it more.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import shlex
import shutil
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache, cached_property
from typing import Any

from ludic.agents.tool_calls import EpisodeLost, ToolError
from ludic.errors import ConfigError, check_value, import_optional
from ludic.inference.client import Episode, current_episode

PREFIX = "mcp:"
LARGEST_MESSAGE = 2**20
"""Bytes of a message of a server."""
ALIVE_S, CLOSE_S, GRACE_S = 5.0, 15.0, 2.0
"""Seconds for a server to answer after another call timed out, to close, and to end by itself."""
_MOST_PAGES = 64
ON_EXIT = ("restart", "lose")


class McpTool:
    """A tool of a server. Its description and schema are the server's."""

    def __init__(self, server: McpServer, tool: Any) -> None:
        if not re.fullmatch(r"[\w.-]{1,64}", str(tool.name), re.ASCII):
            raise ConfigError(
                f"{server.source} has a tool {tool.name!r:.80}; models can call names of up to 64 letters, digits, _ . and -"
            )
        self.server, self.__name__ = server, str(tool.name)
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        self.tool_schema = {"type": "function", "function": function}

    async def __call__(self, **arguments: Any) -> str:
        """The texts of the result, joined. Raises ToolError for one that is an error, and if the
        server ends; EpisodeLost for the latter with `on_exit=lose`."""
        future = self.server.begin_call(self.__name__, arguments)
        return await asyncio.wrap_future(future)


class McpServer:
    """A server, which is started at the first use, and again after it has ended. Thread-safe.

    >>> with McpServer("python -m server") as server:
    ...     agent = ReActAgent(server.tools, client=client, model="m", ctx=ctx, parser=parser)
    """

    def __init__(
        self, source: str, *, per_episode: bool = False, on_exit: str = "restart", start_timeout_s: float = 60.0
    ) -> None:
        """`source`: a command or a URL. `per_episode`: each episode that calls a tool has a server
        of its own. `on_exit`: a call during which the server ends fails, and the next one starts it
        again (`restart`), or its episode fails (`lose`)."""
        self.source = source.removeprefix(PREFIX).strip()
        check_value("mcp.on_exit", on_exit, choices=ON_EXIT)
        check_value("mcp.start_timeout_s", start_timeout_s, above=0)
        check_source(self.source)
        self._per_episode, self._on_exit, self._start_timeout_s = per_episode, on_exit, start_timeout_s
        self._connections: dict[Episode | None, _Connection] = {}
        _SERVERS.add(self)

    @cached_property
    def tools(self) -> tuple[McpTool, ...]:
        """All tools that the server lists. Raises ConfigError if it cannot be started, or lists
        none."""
        future = asyncio.run_coroutine_threadsafe(self._list(), _loop())
        try:
            listed = future.result(2 * self._start_timeout_s + CLOSE_S)
        except Exception as error:
            raise ConfigError(f"the tools of mcp:{self.source} cannot be listed: {_describe(error)}") from error
        if not listed:
            raise ConfigError(f"mcp:{self.source} has no tools; leave it out")
        return tuple(McpTool(self, tool) for tool in listed)

    def begin_call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The call of a tool, as a future of its text."""
        episode = current_episode() if self._per_episode else None
        return asyncio.run_coroutine_threadsafe(self._call(episode, name, dict(arguments)), _loop())

    def close(self) -> None:
        """End the server; its next use starts it again."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), _loop()).result(CLOSE_S)

    def __enter__(self) -> McpServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _list(self) -> list[Any]:
        client, listed, cursor = (await self._connect(None)).client.result(), list[Any](), None
        async with asyncio.timeout(self._start_timeout_s):
            for _ in range(_MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                listed += page.tools
                if (cursor := page.next_cursor) is None:
                    break
        return listed

    async def _connect(self, episode: Episode | None) -> _Connection:
        """The connection of an episode; starts the server unless it runs."""
        if (connection := self._connections.get(episode)) is None:
            connection = self._connections[episode] = _Connection(self.source, self._start_timeout_s)
            if episode is not None:
                episode.on_end(lambda over: _loop().call_soon_threadsafe(self._drop, over))
        try:
            await asyncio.shield(connection.client)
        except ToolError:
            self._drop(episode, connection)
            raise
        return connection

    def _drop(self, episode: Episode | None, connection: _Connection | None = None) -> None:
        """End the server of an episode, unless it is not this `connection` any more."""
        if connection is None or self._connections.get(episode) is connection:
            dropped = self._connections.pop(episode, None)
            if dropped is not None:
                dropped.stop()

    async def _call(self, episode: Episode | None, name: str, arguments: dict[str, Any]) -> str:
        from mcp_types import CONNECTION_CLOSED

        lost = EpisodeLost if self._on_exit == "lose" else ToolError
        try:
            connection = await self._connect(episode)
        except ToolError as error:
            raise lost(f"the server of {name} cannot be started: {error}") from error
        try:
            result = await connection.client.result().call_tool(name, arguments)
        except asyncio.CancelledError:  # the deadline of the call, or the end of the episode
            connection.checks.add(asyncio.create_task(self._check_alive(episode, connection)))
            raise
        except Exception as error:
            if getattr(error, "code", None) == CONNECTION_CLOSED:
                self._drop(episode, connection)
                raise lost(f"the connection to the server of {name} has ended; the call may have been done or not") from error
            raise ToolError(_describe(error)) from error
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    async def _check_alive(self, episode: Episode | None, connection: _Connection) -> None:
        """End a server that answers nothing any more."""
        try:
            async with asyncio.timeout(ALIVE_S):
                await connection.client.result().list_tools(cache_mode="refresh")
        except Exception:
            self._drop(episode, connection)

    async def _close(self) -> None:
        ending = list(self._connections.values())
        for episode in list(self._connections):
            self._drop(episode)
        await asyncio.gather(*(each.task for each in ending), return_exceptions=True)


class _Connection:
    """A client and its server, in the event loop of all servers."""

    def __init__(self, source: str, start_timeout_s: float) -> None:
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Or the ToolError of a server that cannot be started."""
        self.client.add_done_callback(lambda client: client.cancelled() or client.exception())  # perhaps nobody waits for it
        self.checks: set[asyncio.Task[None]] = set()
        self._stop, self._log = asyncio.Event(), bytearray()
        self.task = asyncio.create_task(self._run(source, start_timeout_s))

    def stop(self) -> None:
        self._stop.set()
        if not self.client.done():
            self.task.cancel()

    async def _run(self, source: str, start_timeout_s: float) -> None:
        mcp = import_optional("mcp", "mcp")
        try:
            async with asyncio.timeout(start_timeout_s) as start:
                transport = _http(source) if _is_url(source) else _stdio(shlex.split(source), self._log)
                async with mcp.Client(transport) as client:
                    start.reschedule(None)
                    self.client.set_result(client)
                    await self._stop.wait()
        except BaseException as error:
            if self.client.done():  # the server had ended, or ends badly
                return
            late = f"it is not ready after {start_timeout_s:g} s (mcp.start_timeout_s)"
            wrote = self._log.decode(errors="replace").strip()
            reason = late if isinstance(error, TimeoutError) else _describe(error)
            self.client.set_exception(ToolError(reason + (f"; it wrote: {wrote}" if wrote else "")))


@asynccontextmanager
async def _stdio(command: list[str], log: bytearray) -> AsyncIterator[Any]:
    """The streams of a command, as the SDK's own transport makes them, which reads a line of any
    length. `log` has the end of what it writes to its standard error."""
    from anyio import BrokenResourceError, ClosedResourceError, create_memory_object_stream
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        limit=LARGEST_MESSAGE,
        env=get_default_environment(),
        start_new_session=True,
    )
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    received, to_client = create_memory_object_stream[Any](0)[::-1]
    from_client, sent = create_memory_object_stream[Any](0)[::-1]

    async def read() -> None:
        async with to_client:  # closed at the end, and by a line that is too long
            with suppress(ValueError, BrokenResourceError, ClosedResourceError):
                while line := await stdout.readline():
                    with suppress(ValueError):  # a line of a program that prints, too
                        await to_client.send(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))

    async def write() -> None:
        with suppress(OSError, ClosedResourceError):
            async for item in from_client:
                stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()

    async def keep_log() -> None:
        while chunk := await stderr.read(4096):
            log[:] = (log + chunk)[-1000:]

    tasks = [asyncio.create_task(work()) for work in (read, write, keep_log)]
    try:
        yield received, sent
    finally:
        stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await process.wait()
        with suppress(ProcessLookupError):  # and what it has started
            os.killpg(process.pid, signal.SIGKILL)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (received, to_client, from_client, sent):
            stream.close()
        process._transport.close()  # type: ignore[attr-defined]  # pipes that a process still holds


@asynccontextmanager
async def _http(url: str) -> AsyncIterator[Any]:
    """The SDK's streams of a URL. A body that is no stream of events has a largest size, too."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    class Bounded(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            response = await super().handle_async_request(request)
            if "event-stream" in response.headers.get("content-type", ""):
                return response
            body = b""
            async for chunk in response.aiter_raw():
                if len(body := body + chunk) > LARGEST_MESSAGE:
                    await response.aclose()
                    raise httpx2.ReadError(f"the server's message exceeds {LARGEST_MESSAGE:,} bytes", request=request)
            return httpx2.Response(response.status_code, headers=response.headers, content=body, request=request)

    timeout = httpx2.Timeout(30.0, read=300.0)
    async with (
        httpx2.AsyncClient(transport=Bounded(), timeout=timeout) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


def check_source(source: str) -> None:
    """Raise ConfigError for a command that is not found, and MissingExtraError without the SDK."""
    import_optional("mcp", "mcp")
    source = source.removeprefix(PREFIX).strip()
    if _is_url(source):
        return
    try:
        command = shlex.split(source)
    except ValueError as error:
        raise ConfigError(f"the command of mcp:{source} cannot be read: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise ConfigError(f"mcp:{source} must be a URL, or a command whose program is found, such as mcp:python -m server")


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" if isinstance(error, ToolError) else f"{type(error).__name__}: {getattr(error, 'message', error)}"


def _close_all() -> None:
    for server in list(_SERVERS):
        server.close()


_SERVERS: weakref.WeakSet[McpServer] = weakref.WeakSet()
_START = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all servers, in a thread: runs have several loops, one after another."""
    with _START:
        return _start_loop()


@cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    atexit.register(_close_all)
    return loop
