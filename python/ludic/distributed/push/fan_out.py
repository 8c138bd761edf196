"""One step on several servers at once, and steps that nothing breaks off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Addressed(Protocol):
    """Has the address of a server."""

    @property
    def url(self) -> str: ...


S = TypeVar("S", bound=Addressed)


def on_each(servers: Sequence[S], step: Callable[[S], Any]) -> dict[S, Exception]:
    """Take a step on all servers at once; the errors of those where it failed, in the order of
    the servers."""
    if len(servers) == 1:
        return _failures({servers[0]: _done(lambda: step(servers[0]))})
    with ThreadPoolExecutor(max_workers=max(1, len(servers)), thread_name_prefix="ludic-servers") as pool:
        futures = {server: pool.submit(step, server) for server in servers}
    return _failures(futures)


def _done(call: Callable[[], Any]) -> Future[Any]:
    """The outcome of a call that is made here and now."""
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


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Runs beside this thread, and ends by the call's own deadline."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ludic-servers")
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def to_the_end(call: Callable[[], T], *, what: str) -> T:
    """What `call` gives, made in a thread, which Ctrl-C does not reach: it is raised when the
    call is over. A second one is raised at once; the call goes on, and this process ends after
    it."""
    future = in_thread(call)
    try:
        wait([future])
    except BaseException as interrupt:
        logger.warning("%s is completed first; once more to stop at once", what)
        wait([future])
        raise interrupt from future.exception()
    return future.result()


def failed_servers(failures: Mapping[S, BaseException]) -> str:
    """Each failed server with its reason, for a message."""
    return "; ".join(f"{server.url}: {error}" for server, error in failures.items())


def urls(servers: Iterable[Addressed]) -> str:
    """Addresses, for a message."""
    return ", ".join(server.url for server in servers) or "none"
