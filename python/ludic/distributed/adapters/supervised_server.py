"""One server that somebody starts again when it dies, maybe at another address.

What is asked of it runs in a thread, so that a server that hangs holds up nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ludic.distributed.push.control_plane import VllmControlPlane
from ludic.distributed.push.fan_out import describe_failures, start_in_thread
from ludic.distributed.push.manifest import ServerManifest
from ludic.errors import PublishError, ServerUnreachableError
from ludic.inference.publishing import PushTarget
from ludic.inference.servers.http import is_refused

T = TypeVar("T")


@dataclass(frozen=True)
class ServedVersion:
    """Weights that servers are to load."""

    name: str
    folder: Path
    sent: Mapping[str, str]
    """Fingerprints of the weights in the folder, by name."""
    served: Mapping[str, str]
    """Those of the same in the server's dtypes."""


class NoAddressError(ServerUnreachableError):
    """A server that has not said where it is."""


class HangsError(PublishError):
    """Servers that have not answered yet."""


class ServerAddress(PushTarget):
    """One server, whose requests may need its secret."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.server_urls = [url]
        self._headers = headers

    @property
    def request_headers(self) -> Mapping[str, str]:
        return self._headers


class ServerLife:
    """A server at one address."""

    def __init__(self, url: str, control: VllmControlPlane) -> None:
        self.url = url
        self.version: ServedVersion | None = None
        """What it was given last; None if it may have anything."""
        self._control = control
        self._busy = threading.Lock()

    def has(self, version: ServedVersion) -> bool:
        """Whether it still has the version that it was given. After a restart it has `default`."""
        return self.version is version and self._control.links[0].endpoints.weight_version() == version.name

    def read_manifest(self) -> ServerManifest:
        with self._alone():
            return prepare(self._control)

    def give(self, find_newest: Callable[[], ServedVersion]) -> ServedVersion | None:
        """Have it load the newest version and serve it, unless it has it. Returns what it was
        given. The name changes together with the weights, in the same life of the server, or not
        at all. `find_newest` is called once nobody else talks to the server, so that no version is
        followed by one before it."""
        with self._alone():
            version = find_newest()
            if self.has(version):
                return None
            control, self.version = self._control, None
            prepare(control)
            control.expect(version.sent, version.served)
            control.push_folder(version.folder, version.name)
            self.version = version
            return version

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises HangsError at once while another thread talks to it, which may take long."""
        if not self._busy.acquire(blocking=False):
            raise HangsError("it has not answered what it was asked before")
        try:
            yield
        finally:
            self._busy.release()

    def close(self) -> None:
        self._control.close()


class SupervisedServer:
    """One server, whose address may change when it is started again."""

    def __init__(self, number: int, find_url: Callable[[int], str | None], make: Callable[[str], VllmControlPlane]) -> None:
        self._number, self._find_url, self._make = number, find_url, make
        self._life: ServerLife | None = None
        self._lock = threading.Lock()
        self.is_late = False
        """Whether it had not answered when a wait for it ended. It is not waited for again until it
        has taken a step."""
        self.returning: Future[None] | None = None
        """The last attempt to bring it back."""
        self.warned = ""
        """The last failure to bring it back that was logged as a warning; empty once it is back."""

    @property
    def url(self) -> str:
        """Its last address, for messages."""
        return f"server {self._number}" if self._life is None else self._life.url

    @property
    def version(self) -> ServedVersion | None:
        """What it was given last; None if it may have anything."""
        return None if self._life is None else self._life.version

    def life(self) -> ServerLife:
        """The server at its present address, or at the last one if it has none."""
        with self._lock:
            url = self._find_url(self._number)
            if self._life is None or url not in (None, self._life.url):
                if url is None:
                    raise NoAddressError(f"server {self._number} has no address yet")
                self.close()
                self._life = ServerLife(url, self._make(url))
            return self._life

    def ask(self, step: Callable[[ServerLife], T]) -> AskedServer[T]:
        """Take a step in a thread of its own, which a server that hangs keeps until the deadlines
        of its calls. The thread ends with the process."""

        def answer() -> T:
            taken = step(self.life())
            self.is_late = False
            return taken

        return AskedServer(self, self._find_url(self._number), start_in_thread(answer, daemon=True))

    def has_left(self, url: str | None) -> bool:
        """Whether the process at this address has ended: there is another address now, or none."""
        return url is not None and self._find_url(self._number) != url

    def close(self) -> None:
        if self._life is not None:
            self._life.close()


@dataclass(frozen=True)
class AskedServer(Generic[T]):
    """A server that takes a step."""

    server: SupervisedServer
    url: str | None
    future: Future[T]

    def is_awaited(self) -> bool:
        return not self.future.done() and not self.server.has_left(self.url)

    def find_error(self) -> Exception | None:
        """Why it has not taken the step; None if it has."""
        if self.future.done():
            error = self.future.exception()
            assert error is None or isinstance(error, Exception)
            return error
        if self.server.has_left(self.url):
            return ServerUnreachableError(f"the server at {self.url} has ended")  # or is about to: `is_dead` cannot know
        return HangsError("it has not answered")


def prepare(control: VllmControlPlane) -> ServerManifest:
    """Make a server ready for a push. One that is silent is given up after the short deadline of
    the first question, not after that of a push. One that was taken out of service, because it did
    not say in time that it had loaded a version, is asked again: it is given all weights."""
    control.links[0].endpoints.weight_version()
    control.links[0].drained = False
    return control.prepare()


def combine_failures(failures: Mapping[SupervisedServer, Exception]) -> PublishError:
    """The error of servers of which none has taken a step."""
    kind = HangsError if all(isinstance(error, HangsError) for error in failures.values()) else PublishError
    return kind(describe_failures(failures))


def is_dead(error: Exception) -> bool:
    """Whether the server has no address, or nobody listens there: it will be another life that
    does. One whose connection broke, or that is silent, may live and serve other weights."""
    causes = [error, error.__cause__]
    return any(
        isinstance(cause, NoAddressError) or (isinstance(cause, ServerUnreachableError) and is_refused(cause)) for cause in causes
    )
