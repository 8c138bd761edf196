"""Publishes to vLLM servers that somebody starts again when they die.

A version is a folder that all servers see. Each server loads it by itself, so that one which is
down holds up no other; it gets the newest version once it is back (`bring_back`). Until then its
answers are of version `default`, which clients refuse (`VLLMChatClient.follow_restarts`).

Each request to a server runs in a thread, so that a server that hangs holds up no other.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ludic.distributed.publisher import UnchangedWeights
from ludic.distributed.push.control_plane import VllmControlPlane
from ludic.distributed.push.manifest import (
    ServerManifest,
    StreamToServer,
    VersionFolders,
    cast_to_server,
    fingerprint_folder,
    has_tied_head,
    rename_to_checkpoint,
)
from ludic.distributed.push.target import PushUrls, describe_failures
from ludic.errors import PublishError, ServerUnreachableError
from ludic.event_loop import start_in_thread
from ludic.inference.client import Publisher, Version, Weights, WeightSource
from ludic.inference.servers.http import is_refused

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""How long to wait for a server that is not back yet."""
NOT_BACK = "this is tried again; end its process to have it restarted"


class SupervisedServers(Publisher):
    """Publishes a version to all servers that answer, and later to those that come back.

    `publish` needs one server that serves the version, and waits for the others for `wait_s` more.
    One that has not answered by then is sent no requests until it has the version, which it is
    given while training goes on, and later pushes do not wait for it. The first version of a
    trainer must reach all servers that have an address where a process listens: they may have
    weights of a trainer before it.

    Raises PublishError if servers do not answer for `answer_s` and there is no push without them;
    for other failures that last for `timeout_s`; and for weights that do not fit.
    """

    def __init__(
        self,
        client: Any,
        directory: Path,
        *,
        count: int,
        find_url: Callable[[int], str | None],
        headers: Mapping[str, str],
        timeout_s: float = 600.0,
        answer_s: float = 180.0,
        wait_s: float = 10.0,
        find_end: Callable[[], str | None] = lambda: None,
        is_stopped: Callable[[], bool] = lambda: False,
        partial: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`client` is told of each version. `directory` gets a folder for each; all servers see it
        under the same path. `find_url` gives the present address of a server by its number, 0 to
        `count` - 1. `find_end` says why no server will answer; None while one may. Once
        `is_stopped`, there are only `wait_s` left, for a push that goes on. `partial`: frozen
        weights are left out of a push."""

        self._client, self._find_end, self._is_stopped, self._clock = client, find_end, is_stopped, clock
        self._timeout_s, self._answer_s, self._wait_s, self._headers = timeout_s, answer_s, wait_s, headers
        self._folders = VersionFolders(directory)
        self._servers = [SupervisedServer(number, find_url, self._make_life) for number in range(count)]
        self._partial = partial
        self._unchanged = UnchangedWeights("weights", resent=True)
        self._lock = threading.Lock()
        self._current: ServedVersion | None = None
        self._is_first = True
        """Whether servers may have weights of another trainer: until a push succeeds."""
        self._manifest: ServerManifest | None = None
        self._seconds = 0.0

    def _make_life(self, url: str) -> ServerLife:
        target = PushUrls([url], self._headers)
        return ServerLife(url, VllmControlPlane(target, timeout_s=self._answer_s, by_folder=True, partial=self._partial))

    async def publish(self, state_dict: Weights, version: Version = None) -> None:
        await asyncio.to_thread(self._publish, state_dict, version)

    async def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        await asyncio.to_thread(self._publish, weights, version)

    def _publish(self, weights: Weights | WeightSource, version: Version) -> None:
        with self._lock:
            if self._manifest is None:
                self._repeat(self._ask_for_manifest, "no server can be published to")
            manifest = self._manifest
            assert manifest is not None
            if not isinstance(weights, Mapping) and has_tied_head(weights, manifest):
                weights = dict(weights)
            if isinstance(weights, Mapping):
                cast = cast_to_server(rename_to_checkpoint(weights), manifest, partial=self._partial)
                folder = self._folders.write(cast, version)
            else:
                folder = self._folders.write_stream(StreamToServer(weights, manifest, partial=self._partial), version)
            sent, served = fingerprint_folder(folder, manifest, partial=self._partial)
            self._serve(ServedVersion(str(version), folder, sent, served), version, served, dtype=manifest.dtype)
            self._folders.prune(folder)

    def _ask_for_manifest(self) -> None:
        asked = [server.ask(ServerLife.read_manifest) for server in self._servers]
        failures = self._wait(asked, lambda: any(each.find_error() is None for each in asked))
        answers = [each.future.result() for each in asked if each.server not in failures]
        if not answers:
            raise combine_failures(failures)
        self._manifest = answers[0]

    def _serve(self, current: Any, version: Version, fingerprints: Mapping[str, str], *, dtype: str = "dtype") -> None:
        """Have the servers serve `current`: a `ServedVersion`, or what else `_make_life` loads."""
        self._current = current
        started = time.perf_counter()

        def push() -> None:
            self._repeat(self._give_to_all, f"version {version} was not published")

        # A push even of unchanged weights: a server changes its version only with its weights.
        self._unchanged.publish(fingerprints, version, push=push, rename=push, still_served=lambda: True, dtype=dtype)
        self._seconds = time.perf_counter() - started
        lost = [server.url for server in self._servers if server.version is not self._current]
        self._tell_client(version, lost)

    def _tell_client(self, version: Version, lost: list[str]) -> None:
        self._client.weights_changed(version, lost=lost)

    def _give_to_all(self) -> None:
        """Give the version to the servers that lack it. Raises PublishError if none has it then, or
        if one may have weights of another trainer."""
        version = self._current
        assert version is not None
        lacking = [server for server in self._servers if server.version is not version]
        asked = [server.ask(lambda life: life.give(self._find_newest)) for server in lacking]

        def is_served() -> bool:
            return any(server.version is version for server in self._servers)

        failures = self._wait(asked, is_served, forever=self._is_first)
        failures = {server: error for server, error in failures.items() if server.version is not version}
        unknown = {server: error for server, error in failures.items() if not is_dead(error)}
        hanging = {server: error for server, error in unknown.items() if isinstance(error, HangsError)}
        if self._is_first and unknown:
            raise combine_failures(hanging or unknown)
        if len(failures) == len(self._servers):
            raise combine_failures(failures)
        self._is_first = False
        for server, error in failures.items():
            logger.warning("%s does not serve version %s yet: %s", server.url, version.name, error)

    def _find_newest(self) -> ServedVersion:
        assert self._current is not None
        return self._current

    def _wait(
        self, asked: Sequence[AskedServer[Any]], is_enough: Callable[[], bool], *, forever: bool = False
    ) -> dict[SupervisedServer, Exception]:
        """Wait until all have answered: not for those that have ended, `answer_s` at most, and from
        when it `is_enough` for `wait_s`, or not at all for servers that were late before, unless
        `forever`. Returns the servers that have not taken the step."""
        began, enough_at, awaited = self._clock(), None, list(asked)
        while awaited := [each for each in awaited if each.is_awaited()]:
            now = self._clock()
            if enough_at is None and (self._is_stopped() or (is_enough() and not forever)):
                enough_at = now
            waited = enough_at is not None and (now >= enough_at + self._wait_s or all(each.server.is_late for each in awaited))
            if waited or now >= began + self._answer_s or self._find_end() is not None:
                break
            wait([each.future for each in awaited], RETRY_S, FIRST_COMPLETED)
        for each in awaited:
            each.server.is_late = True
        return {each.server: error for each in asked if (error := each.find_error()) is not None}

    def _repeat(self, step: Callable[[], None], consequence: str) -> None:
        """Take a step again until it succeeds: for `timeout_s`, or for `answer_s` if all that fails
        is that servers do not answer."""
        began = self._clock()
        while True:
            try:
                return step()
            except PublishError as error:
                if (reason := "the run was asked to stop" if self._is_stopped() else self._find_end()) is not None:
                    raise PublishError(f"{consequence}: {reason}") from error
                limit_s, remedy = self._timeout_s, ""
                if isinstance(error, HangsError):
                    limit_s = min(limit_s, self._answer_s)
                    remedy = "; raise inference.push_timeout_s if it only takes long, else end the processes of these servers"
                if self._clock() >= began + limit_s:
                    raise PublishError(f"{consequence} within {limit_s:g} s: {error}{remedy}") from error
            time.sleep(RETRY_S)

    def bring_back(self) -> None:
        """Give the newest version to each server that lacks it: those that were restarted, and
        those that the last push did not reach. One that does not answer is left for the next
        call."""
        version = self._current
        if version is None:
            return

        asked = []
        for server in self._servers:
            if server.returning is None or server.returning.done():
                asked.append(server.ask(functools.partial(self._return, server, version)))
                server.returning = asked[-1].future
        for server, error in self._wait(asked, lambda: True).items():
            logger.info("%s is not back: %s", server.url, error)

    def _return(self, server: SupervisedServer, version: ServedVersion, life: ServerLife) -> None:
        """Give a server the newest version, which was `version`, unless it has it. A failure is
        logged as a warning, once, unless the server has ended or is being talked to."""
        try:
            if life.has(version):  # asked during a push, which is not to wait for the answer
                return
            given = life.give(self._find_newest)
        except Exception as error:
            if not isinstance(error, HangsError) and not is_dead(error) and str(error) != server.warned:
                logger.warning("%s is not back, and gets no requests: %s; %s", life.url, error, NOT_BACK)
                server.warned = str(error)
            raise
        server.warned = ""
        if given is not None:
            logger.warning("%s is back, with version %s of the weights", life.url, given.name)

    def expect_change(self, expected: bool) -> None:
        self._unchanged.change_expected = expected

    def close(self) -> None:
        for server in self._servers:
            server.close()

    @property
    def timings(self) -> Mapping[str, float]:
        return {"push_s": self._seconds}


T = TypeVar("T")


@dataclass(frozen=True)
class ServedVersion:
    """Weights that servers are to load."""

    name: str
    folder: Path
    sent: Mapping[str, str]
    """Fingerprints of the weights in the folder, by name."""
    served: Mapping[str, str]
    """The same weights in the server's dtypes."""


class NoAddressError(ServerUnreachableError):
    """A server that has not said where it is."""


class HangsError(PublishError):
    """Servers that have not answered yet."""


class ServerLife:
    """A server at one address."""

    def __init__(self, url: str, control: Any) -> None:
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
        at all. `find_newest` is called once no other thread talks to the server, so that no version
        is followed by an older one."""
        with self._alone():
            version = find_newest()
            if self.has(version):
                return None
            self.version = None
            self.load(version)
            self.version = version
            return version

    def load(self, version: ServedVersion) -> None:
        prepare(self._control)
        self._control.expect(version.sent, version.served)
        self._control.push_folder(version.folder, version.name)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises HangsError immediately while another thread talks to it, which may take long."""
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

    def __init__(self, number: int, find_url: Callable[[int], str | None], make: Callable[[str], ServerLife]) -> None:
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
                self._life = self._make(url)
            return self._life

    def ask(self, step: Callable[[ServerLife], T]) -> AskedServer[T]:
        """Take a step in a thread of its own, which a server that hangs keeps until the deadlines
        of its calls. The thread ends with the process."""

        def answer() -> T:
            taken = step(self.life())
            self.is_late = False
            return taken

        return AskedServer(self, self._find_url(self._number), start_in_thread(answer, name="ludic-servers", daemon=True))

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
    the first question, not after the deadline of a push. One that was taken out of service, because
    it did not say in time that it had loaded a version, is asked again: it is given all weights."""
    control.links[0].endpoints.weight_version()
    control.links[0].drained = False
    return control.prepare()


def combine_failures(failures: Mapping[SupervisedServer, Exception]) -> PublishError:
    """The error of servers of which none has taken a step."""
    kind = HangsError if all(isinstance(error, HangsError) for error in failures.values()) else PublishError
    return kind(describe_failures(failures))


def is_dead(error: Exception) -> bool:
    """Whether the server has no address, or no process listens there: the next one is a restarted
    server. One whose connection broke, or that is silent, may live and serve other weights."""
    causes = [error, error.__cause__]
    return any(
        isinstance(cause, NoAddressError) or (isinstance(cause, ServerUnreachableError) and is_refused(cause)) for cause in causes
    )
