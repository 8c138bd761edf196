"""One step on several servers at once, and calls that Ctrl-C does not break off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Addressed(Protocol):
    """Anything with the address of a server."""

    @property
    def url(self) -> str: ...


S = TypeVar("S", bound=Addressed)


def run_on_all(servers: Sequence[S], step: Callable[[S], Any]) -> dict[S, Exception]:
    """Run a step on all servers at once. Returns the servers where it failed, in the order of
    `servers`, with their errors."""
    if len(servers) == 1:  # in this thread, which Ctrl-C reaches
        return _failures({servers[0]: _completed(lambda: step(servers[0]))})
    with ThreadPoolExecutor(max_workers=max(1, len(servers)), thread_name_prefix="ludic-servers") as pool:
        futures = {server: pool.submit(step, server) for server in servers}
    return _failures(futures)


def _completed(call: Callable[[], Any]) -> Future[Any]:
    """The result of a call made now, as a future."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def _failures(futures: Mapping[S, Future[Any]]) -> dict[S, Exception]:
    failures = {}
    for server, future in futures.items():
        error = future.exception()
        if isinstance(error, Exception):
            failures[server] = error
        elif error is not None:
            raise error
    return failures


def start_in_thread(call: Callable[[], T]) -> Future[T]:
    """Start a call in a thread of its own. Only the call's own deadline ends it."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ludic-servers")
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def complete_before_interrupt(call: Callable[[], T], *, what: str) -> T:
    """Run a call in a thread and return its result. A Ctrl-C during the call is raised after it;
    a second one is raised at once, while the call goes on: this process ends after the call."""
    future = start_in_thread(call)
    try:
        wait([future])
    except BaseException as interrupt:
        logger.warning("%s is completed first; once more to stop at once", what)
        wait([future])
        raise interrupt from future.exception()
    return future.result()


def describe_failures(failures: Mapping[S, BaseException]) -> str:
    """Each failed server with its error, for a message."""
    return "; ".join(f"{server.url}: {error}" for server, error in failures.items())


def list_urls(servers: Iterable[Addressed]) -> str:
    """The addresses, for a message."""
    return ", ".join(server.url for server in servers) or "none"
