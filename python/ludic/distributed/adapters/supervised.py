"""Publishes to vLLM servers that somebody starts again when they die.

A version is a folder that all servers see. Each server loads it by itself, so that one which is
down holds up no other; it gets the newest version once it is back (`bring_back`). Until then its
answers are of version `default`, which clients refuse (`VLLMChatClient.follow_restarts`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.distributed.push.control_plane import VllmControlPlane
from ludic.distributed.push.fan_out import describe_failures, run_on_all
from ludic.distributed.push.folder import VersionFolders, fingerprint_folder
from ludic.distributed.push.manifest import ServerManifest, StreamToServer, cast_to_server, has_tied_head, rename_to_checkpoint
from ludic.distributed.unchanged import UnchangedWeights
from ludic.errors import InferenceError, PublishError, ServerUnreachableError
from ludic.inference.publishing import Publisher, PushTarget, Version, WeightSource
from ludic.inference.servers.http import is_refused

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""How long to wait for a server that is not back yet."""


@dataclass(frozen=True)
class _Version:
    name: str
    folder: Path
    sent: Mapping[str, str]
    """Fingerprints of the weights in the folder, by name."""
    served: Mapping[str, str]
    """Those of the same in the server's dtypes."""


class NoAddressError(ServerUnreachableError):
    """A server that has not said where it is."""


class _Address(PushTarget):
    """One server, whose requests may need its secret."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.server_urls = [url]
        self._headers = headers

    @property
    def request_headers(self) -> Mapping[str, str]:
        return self._headers


class _Supervised:
    """One server, whose address may change when it is started again."""

    def __init__(self, number: int, find_url: Callable[[int], str | None], make: Callable[[str], VllmControlPlane]) -> None:
        self._number, self._find_url, self._make = number, find_url, make
        self._control: VllmControlPlane | None = None
        self.version: _Version | None = None
        """What it was given last; None if it may have anything."""
        self._giving = threading.Lock()

    @property
    def url(self) -> str:
        """Its last address, for messages."""
        return f"server {self._number}" if self._control is None else self._control.links[0].url

    def control(self) -> VllmControlPlane:
        url = self._find_url(self._number)
        if self._control is None or url not in (None, self._control.links[0].url):
            if url is None:
                raise NoAddressError(f"server {self._number} has no address yet")
            self.close()
            self._control, self.version = self._make(url), None
        return self._control

    def has(self, version: _Version) -> bool:
        """Whether it still has the version that it was given. After a restart it has `default`."""
        return self.version is version and self.control().links[0].endpoints.weight_version() == version.name

    def give(self, find_newest: Callable[[], _Version]) -> _Version | None:
        """Have it load the newest version and serve it, unless it has it. Returns what it was
        given. The name changes together with the weights, in the same life of the server, or not
        at all.

        Raises PublishError at once while another thread gives it a version, which may take long.
        """
        if not self._giving.acquire(blocking=False):
            raise PublishError(f"{self.url} is being given a version already")
        try:
            version = find_newest()
            if self.has(version):
                return None
            control, self.version = self.control(), None
            prepare(control)
            control.expect(version.sent, version.served)
            control.push_folder(version.folder, version.name)
            self.version = version
            return version
        finally:
            self._giving.release()

    def close(self) -> None:
        if self._control is not None:
            self._control.close()


def prepare(control: VllmControlPlane) -> ServerManifest:
    """Make a server ready for a push. One that is silent is given up after the short deadline of
    the first question, not after that of a push."""
    control.links[0].endpoints.weight_version()
    return control.prepare()


class SupervisedServers(Publisher):
    """Publishes a version to all servers that answer, and later to those that come back.

    `publish` needs one server that serves the version, and waits for the others that it began to
    give it to. The first one of a trainer must reach all servers that have an address where
    somebody listens: they may have weights of a trainer before it. Raises PublishError after
    `timeout_s`, and for weights that do not fit.
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
        find_end: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`client` is told of each version. `directory` gets a folder for each; all servers see it
        under the same path. `find_url` gives the present address of a server by its number, 0 to
        `count` - 1. `find_end` says why not to wait any more; None while one may."""

        def make(url: str) -> VllmControlPlane:
            return VllmControlPlane(_Address(url, headers), timeout_s=timeout_s, by_folder=True)

        self._client, self._timeout_s, self._find_end = client, timeout_s, find_end
        self._folders = VersionFolders(directory)
        self._servers = [_Supervised(number, find_url, make) for number in range(count)]
        self._unchanged = UnchangedWeights("weights", resent=True)
        self._lock = threading.Lock()
        self._current: _Version | None = None
        self._is_first = True
        """Whether servers may have weights of another trainer: until a push succeeds."""
        self._manifest: ServerManifest | None = None
        self._seconds = 0.0

    async def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        await asyncio.to_thread(self._publish, state_dict, version)

    async def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        await asyncio.to_thread(self._publish_stream, weights, version)

    def _publish(self, state_dict: Mapping[str, Tensor], version: Version) -> None:
        with self._lock:
            manifest = self._read_manifest()
            weights = cast_to_server(rename_to_checkpoint(state_dict), manifest, partial=False)
            self._serve(self._folders.write(weights, version), version, manifest)

    def _publish_stream(self, weights: WeightSource, version: Version) -> None:
        with self._lock:
            manifest = self._read_manifest()
            if not has_tied_head(weights, manifest):
                folder = self._folders.write_stream(StreamToServer(weights, manifest, partial=False), version)
                self._serve(folder, version, manifest)
                return
        self._publish(dict(weights), version)

    def _read_manifest(self) -> ServerManifest:
        """What the servers' model consists of, from the first that answers."""
        if self._manifest is None:

            def ask() -> None:
                failures: dict[_Supervised, Exception] = {}
                for server in self._servers:
                    try:
                        self._manifest = prepare(server.control())
                        return
                    except (InferenceError, PublishError) as error:
                        failures[server] = error
                raise PublishError(describe_failures(failures))

            self._repeat(ask, "no server can be published to")
        assert self._manifest is not None
        return self._manifest

    def _serve(self, folder: Path, version: Version, manifest: ServerManifest) -> None:
        sent, served = fingerprint_folder(folder, manifest)
        self._current = _Version(str(version), folder, sent, served)
        started = time.perf_counter()

        def push() -> None:
            self._repeat(self._give_to_all, f"version {version} was not published")

        # A push even of unchanged weights: a server changes its version only with its weights.
        self._unchanged.publish(served, version, push=push, rename=push, still_served=lambda: True, dtype=manifest.dtype)
        self._seconds = time.perf_counter() - started
        self._client.weights_changed(version)
        self._folders.prune(folder)

    def _give_to_all(self) -> None:
        """Give the version to the servers that lack it. Raises PublishError if none has it then, or
        if one may have weights of another trainer."""
        version = self._current
        assert version is not None
        lacking = [server for server in self._servers if server.version is not version]
        failures = run_on_all(lacking, lambda server: server.give(lambda: version))
        unknown = {server: error for server, error in failures.items() if not _is_dead(error)}
        if len(failures) == len(self._servers) or (self._is_first and unknown):
            raise PublishError(describe_failures(unknown or failures))
        self._is_first = False
        for server, error in failures.items():
            logger.warning("%s does not serve version %s yet: %s", server.url, version.name, error)

    def _repeat(self, step: Callable[[], None], consequence: str) -> None:
        """Take a step again until it succeeds, for `timeout_s`."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return step()
            except PublishError as error:
                if (reason := self._find_end()) is not None:
                    raise PublishError(f"{consequence}: {reason}") from error
                if time.monotonic() > deadline:
                    raise PublishError(f"{consequence} within {self._timeout_s:g} s: {error}") from error
            time.sleep(RETRY_S)

    def bring_back(self) -> None:
        """Give the newest version to each server that lacks it: those that were restarted, and
        those that the last push did not reach. One that does not answer is left for the next
        call."""
        version = self._current
        if version is None:
            return
        for server in self._servers:
            try:
                if server.has(version):  # asked beside a push, which is not to wait for the answer
                    continue
                if (given := server.give(lambda: self._current or version)) is not None:
                    logger.warning("%s is back, with version %s of the weights", server.url, given.name)
            except (InferenceError, PublishError, OSError) as error:
                logger.info("%s is not back: %s", server.url, error)

    def expect_change(self, expected: bool) -> None:
        self._unchanged.change_expected = expected

    def close(self) -> None:
        for server in self._servers:
            server.close()

    @property
    def timings(self) -> Mapping[str, float]:
        return {"push_s": self._seconds}


def _is_dead(error: Exception) -> bool:
    """Whether the server has no address, or nobody listens there: it will be another life that
    does. One whose connection broke, or that is silent, may live and serve other weights."""
    causes = [error, error.__cause__]
    return any(
        isinstance(cause, NoAddressError) or (isinstance(cause, ServerUnreachableError) and is_refused(cause)) for cause in causes
    )
