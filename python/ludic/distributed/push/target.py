"""The servers of a push, from a client, a URL, or a list of either; steps that run on all of them
concurrently, and calls that Ctrl-C must not interrupt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from ludic.errors import PublishError, PublishTimeoutError
from ludic.event_loop import start_in_thread
from ludic.inference.client import PushTarget, Version


class PushUrls(PushTarget):
    """Servers without a client. Requests to them have these headers, such as their secret."""

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str] | None = None) -> None:
        self.server_urls, self._headers = list(urls), headers or {}

    @property
    def request_headers(self) -> Mapping[str, str]:
        return self._headers


class _UserClient(PushTarget):
    """A client that does not derive from `PushTarget`. It has `server_url` or `server_urls`, and
    other members of `PushTarget` or not. Its headers come from its `_session`, if it has one."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.server_urls = getattr(client, "server_urls", None) or [client.server_url]
        self.connections = getattr(client, "_connections", None)

    @property
    def request_headers(self) -> Mapping[str, str]:
        session = getattr(self._client, "_session", None)
        return {} if session is None else dict(session.headers)

    def hold_connections(self, connections: Any) -> None:
        """Also keep the connections on the user's client, where a later `as_push_target` finds
        them."""
        self.connections = self._client._connections = connections

    def weights_changed(self, version: Version, *, lost: Sequence[str] = ()) -> None:
        if hasattr(self._client, "weights_changed"):
            self._client.weights_changed(version, lost=lost)

    def adapter_changed(self, name: str, served_name: str) -> None:
        names = getattr(self._client, "served_names", None)
        if names is not None:
            names[name] = served_name


def as_push_target(client: PushTarget | str | Sequence[Any] | Any) -> PushTarget:
    """The servers of a client, of a URL, or of several clients and URLs."""
    if isinstance(client, PushTarget):
        return client
    if isinstance(client, str):
        return PushUrls([client])
    if isinstance(client, Sequence):
        return PushUrls([url for one in client for url in as_push_target(one).all_urls()])
    return _UserClient(client)


logger = logging.getLogger(__name__)
T = TypeVar("T")


class Addressed(Protocol):
    """An object with the address of a server."""

    @property
    def url(self) -> str: ...


S = TypeVar("S", bound=Addressed)


def run_on_all(servers: Sequence[S], step: Callable[[S], Any]) -> dict[S, Exception]:
    """Run a step on all servers concurrently. Returns the servers where it failed, in the order of
    `servers`, with their errors. Raises a BaseException such as KeyboardInterrupt."""
    failures: dict[S, Exception] = {}
    if len(servers) == 1:  # in this thread, which Ctrl-C reaches
        try:
            step(servers[0])
        except Exception as error:
            failures[servers[0]] = error
        return failures
    with ThreadPoolExecutor(max_workers=max(1, len(servers)), thread_name_prefix="ludic-servers") as pool:
        futures = {server: pool.submit(step, server) for server in servers}
    for server, future in futures.items():
        failure = future.exception()
        if isinstance(failure, Exception):
            failures[server] = failure
        elif failure is not None:
            raise failure
    return failures


def complete_before_interrupt(call: Callable[[], T], *, what: str) -> T:
    """Run a call in a thread and return its result. A Ctrl-C during the call is raised after it. A
    second one is raised immediately, but the process still ends only after the call, unless it is
    made in a daemon thread, which Ctrl-C does not reach and which ends with the process. Before the
    call has begun, a Ctrl-C is raised in its place."""
    future: Future[T] = Future()
    try:
        start_in_thread(call, name="ludic-servers", daemon=threading.current_thread().daemon, future=future)
        wait([future])
    except BaseException as interrupt:
        if future.cancel():  # it came before the call began
            raise
        logger.warning("%s is completed first; press Ctrl-C again to stop immediately", what)
        wait([future])
        raise interrupt from future.exception()
    return future.result()


def describe_failures(failures: Mapping[S, BaseException]) -> str:
    """Each failed server with its error, for a message."""
    return "; ".join(f"{server.url}: {error}" for server, error in failures.items())


def make_publish_error(
    message: str, causes: Iterable[BaseException], *, answers: Sequence[Mapping[str, Any]] = ()
) -> PublishError:
    """The error of a push that failed on some servers. The first of `causes` becomes its cause."""
    causes = list(causes)
    kind = PublishTimeoutError if all(isinstance(cause, TimeoutError) for cause in causes) else PublishError
    error = kind(message, answers=answers)
    error.__cause__ = causes[0]
    return error


def list_urls(servers: Iterable[Addressed]) -> str:
    """The addresses, for a message."""
    return ", ".join(server.url for server in servers) or "none"
