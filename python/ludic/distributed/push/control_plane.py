"""The control plane of a push to vLLM servers: runs each step on all servers of the push
concurrently."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.distributed.interfaces import WeightMetadata
from ludic.distributed.push.manifest import ServerManifest, check_fit
from ludic.distributed.push.server_link import ServerLink
from ludic.distributed.push.target import (
    as_push_target,
    complete_before_interrupt,
    describe_failures,
    list_urls,
    make_publish_error,
    run_on_all,
)
from ludic.errors import ConfigError, PublishError, on_error
from ludic.inference.client import Version
from ludic.inference.vllm.endpoints import VllmEndpoints

if TYPE_CHECKING:
    from torch import Tensor

    from ludic.inference.vllm.in_server.weight_receiver import DeltaHeader

logger = logging.getLogger(__name__)

ABANDONED = "the push was abandoned, and no server loaded any of it"
STAY_PAUSED = "these may stay paused, and then answer no requests until the next push"


class VllmControlPlane:
    """Announces a push to the servers, and has them load and serve it.

    >>> control = VllmControlPlane(client)
    >>> control.prepare()
    """

    def __init__(
        self,
        client: Any,
        *,
        master_address: str = "127.0.0.1",
        timeout_s: float = 60.0,
        tolerate_lost_servers: bool = False,
        partial: bool = False,
        by_folder: bool = False,
        sleep_level: int | None = None,
    ) -> None:
        """`master_address` is the address at which the servers reach the trainer; `timeout_s`
        limits each transfer.

        tolerate_lost_servers: take a server that fails out of service and continue with the others.
            By default a failure is an error.
        partial: a push may omit frozen weights, whose values the server has.
        by_folder: weights go through folders that the servers see; no connection is opened.
        sleep_level: 1 or 2, the level at which the servers sleep between pushes. None: they do not.
        """
        self.sleep_level = sleep_level
        self.target = as_push_target(client)
        self.links = [
            ServerLink(
                VllmEndpoints(url, headers=self.target.request_headers),
                master_address=master_address,
                timeout_s=timeout_s,
                by_folder=by_folder,
                sleep_level=sleep_level,
            )
            for url in self.target.all_urls()
        ]
        if not self.links:
            raise ConfigError("there is no server to publish to; pass a client with server_url, or URLs")
        self.tolerate_lost_servers = tolerate_lost_servers
        self.partial = partial
        self.timings: dict[str, float] = {}
        """Seconds of the last push: `transfer_s` while tensors arrive and requests wait, `paused_s`
        from pause to resume."""
        self.version: str | None = None
        """The version that was loaded last."""
        self._live: list[ServerLink] = []
        """The servers that take part in the current push."""
        self._open = False
        self._start = 0.0
        self._sent: dict[str, str] = {}
        self._served: dict[str, str] = {}
        self._push_id: str | None = None
        self.target.hold_connections(self)  # where VllmTensorCommunicator(client) finds them

    @property
    def drained(self) -> list[str]:
        """The URLs of servers that were taken out of service."""
        return [link.url for link in self.links if link.drained]

    def prepare(self) -> ServerManifest:
        """Connect to every server that is not connected. Returns the manifest of their model."""
        self._live = list(self.links)
        self._run_on_live(ServerLink.prepare, "no push was started")
        manifest, *others = [link.manifest for link in self._live]
        assert manifest is not None
        if any(other != manifest for other in others):
            raise PublishError(f"the servers {list_urls(self._live)} serve different shapes or dtypes; serve the same on all")
        return manifest

    @property
    def base(self) -> str | None:
        """The id of the push that all servers kept when `prepare` asked them, if it is one."""
        bases = {link.base for link in self._live}
        return bases.pop() if len(bases) == 1 else None

    def expect(self, sent: Mapping[str, str], served: Mapping[str, str] | None = None, *, push_id: str | None = None) -> None:
        """Set the fingerprints of the weights that the next push sends, and of those that each
        server must have after it, if their dtype differs. With `push_id`, servers keep what they
        are sent, for a delta."""
        self._sent, self._served, self._push_id = dict(sent), dict(sent if served is None else served), push_id

    def sleep(self) -> None:
        """Have all servers free their memory until the next push, which wakes them."""
        if failures := run_on_all(self.links, ServerLink.sleep):
            raise make_publish_error(f"the device was not freed: {describe_failures(failures)}", failures.values())

    def serves(self, fingerprints: Mapping[str, str]) -> bool:
        """Whether every server still has the weights with these fingerprints, so that none was
        restarted or got other weights."""
        version = str(self.version)
        return not run_on_all(self._live, lambda link: link.check_fingerprints(version, fingerprints, fingerprints))

    def rename(self, version: Version) -> None:
        """Change the version of the served weights without a push."""
        name = _version_name(version)
        self._run_on_live(lambda link: link.endpoints.set_weight_version(name), f"version {version} was not published")
        self.version, self.timings = name, {}
        self._notify_client()

    def announce_update_batch(self, metadata: list[WeightMetadata], version: Version = None) -> None:
        """Start a push of these tensors, which will be sent in this order."""
        for link in self._live:
            assert link.manifest is not None
            check_fit(metadata, link.manifest, partial=self.partial)
        update_info = {
            "names": [entry["name"] for entry in metadata],
            "dtype_names": [str(entry["dtype"]).removeprefix("torch.") for entry in metadata],
            "shapes": [list(entry["shape"]) for entry in metadata],
        }
        self._begin(update_info, version)

    def announce_folder(self, folder: Path, version: Version = None) -> None:
        """Start a push of the safetensors in a folder that the servers see under the same path."""
        self._begin({"path": str(folder)}, version)

    def push_folder(self, folder: Path, version: Version = None) -> None:
        """Have every server read the folder and serve it. On a failure before they load it, the
        servers keep their weights."""
        with on_error(self.abandon_update):
            self.announce_folder(folder, version)
            self.finalize_update(version)

    def push_delta(self, header: DeltaHeader, changes: Tensor | Path, version: Version = None) -> None:
        """Send what changed since the push that the servers keep: [bytes], or a folder with it. On
        a failure before they load it, the servers keep their weights."""
        with on_error(self.abandon_update):
            if isinstance(changes, Path):
                self._begin({"delta": header, "path": str(changes)}, version)
            else:
                self._begin({"delta": header}, version)
                self.send(changes)
            self.finalize_update(version)

    def _begin(self, update_info: Mapping[str, Any], version: Version) -> None:
        self._open, self._start = True, time.perf_counter()
        if self._push_id is not None:
            update_info = {**update_info, "push_id": self._push_id}
        self._run_on_live(lambda link: link.begin(update_info), _not_published(version))

    def send(self, tensor: Tensor) -> None:
        """Broadcast a tensor to every server of the push."""
        self._run_on_live(lambda link: link.send(tensor), ABANDONED)

    def wait_staged(self) -> None:
        """Wait until every server has staged the whole push."""
        self._run_on_live(ServerLink.wait_staged, ABANDONED)

    def finalize_update(self, version: Version = None) -> None:
        """Have every server load the staged weights as this version. A Ctrl-C between pause and
        resume is raised after the resume."""
        self.wait_staged()
        self.timings = {"transfer_s": time.perf_counter() - self._start}
        complete_before_interrupt(lambda: self._switch(version), what="the push")

    def _switch(self, version: Version) -> None:
        """Pause, load and resume. A server resumes with its old weights or with the new ones, and
        its prefix cache never has entries of other weights."""
        self._open = False  # from here on the push cannot be abandoned
        name = _version_name(version)
        pause_start = time.perf_counter()
        self._pause(version)
        failures = run_on_all(self._live, lambda link: link.commit(name, self._sent, self._served))
        failures |= run_on_all([link for link in self._live if link not in failures], ServerLink.resume)
        run_on_all(list(failures), ServerLink.drain)
        self.timings["paused_s"] = time.perf_counter() - pause_start
        self._live = [link for link in self._live if link not in failures]
        self.version = name if self._live else self.version
        self._notify_client()
        if not failures:
            return
        message = (
            f"version {name} is served by {list_urls(self._live)}; taken out of service: {describe_failures(failures)}. Restart those: "
            "they answer no requests until then"
        )
        if not (self.tolerate_lost_servers and self._live):
            raise make_publish_error(message, failures.values())
        logger.error("%s", message)

    def _pause(self, version: Version) -> None:
        """Pause all servers. If one fails, resume all and raise PublishError."""
        try:
            self._run_on_live(ServerLink.pause, _not_published(version))
        except PublishError as error:
            self._open = True
            stuck = run_on_all(self._live, ServerLink.resume)
            if stuck:
                self._notify_client(lost=[link.url for link in stuck])
                raise make_publish_error(f"{error}; {STAY_PAUSED}: {describe_failures(stuck)}", stuck.values()) from error
            raise

    def _notify_client(self, lost: Sequence[str] = ()) -> None:
        """Tell the client which version is served now, and which servers must get no requests."""
        if self.version is not None or lost:
            self.target.weights_changed(self.version, lost=[*self.drained, *lost])

    def abandon_update(self) -> None:
        """Drop a push that no server has loaded."""
        if self._open:
            self._open = False
            failures = run_on_all(self._live, ServerLink.abandon)
            if failures:
                logger.warning("some servers could not drop the push: %s", describe_failures(failures))

    def close(self) -> None:
        """Close the connections to all servers, which keep their weights."""
        for link in self.links:
            link.close()

    def _run_on_live(self, step: Callable[[ServerLink], Any], consequence: str) -> None:
        """Run a step on all servers of the push. A failure raises an error whose message begins
        with `consequence`; with `tolerate_lost_servers` the push continues without that server."""
        failures = run_on_all(self._live, step)
        if not failures:
            return
        remaining = [link for link in self._live if link not in failures]
        if not (self.tolerate_lost_servers and remaining):
            raise make_publish_error(f"{consequence}: {describe_failures(failures)}", failures.values())
        logger.error("continuing without %s", describe_failures(failures))
        run_on_all(list(failures), ServerLink.drain)
        self._live = remaining


def _version_name(version: Version) -> str:
    return f"vllm-{time.time_ns()}" if version is None else str(version)


def _not_published(version: Version) -> str:
    return f"version {version} was not published, and no server loaded any of it"
