"""Publishes to vLLM servers while they serve, through their own endpoints for reinforcement
learning.

A push to one server or to several: the weights are checked against each server's model, taken aside
by all (which go on with the old ones), and only then, with generation paused, loaded by all; prefix
caches are forgotten, and what each server then holds is compared with what the trainer sent. Until
all have everything, any failure leaves the old version everywhere. A server that fails later is
taken out of service and named; it never serves a mix.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.distributed.adapters.reward_model import (
    RMPublisherAdapter as RMPublisherAdapter,
    create_rm_publisher as create_rm_publisher,
)
from ludic.distributed.interfaces import LearningPublisher, PolicyPublisher, WeightMetadata
from ludic.distributed.publisher import BroadcastPolicyPublisher, Rank0OnlyPublisher
from ludic.distributed.push.fan_out import failed_servers, on_each, to_the_end, urls
from ludic.distributed.push.folder import CheckpointFolder
from ludic.distributed.push.link import ServerLink
from ludic.distributed.push.manifest import ServerManifest, check_fit, checkpoint_names, fitted
from ludic.distributed.unchanged import UnchangedWeights
from ludic.errors import ConfigError, PublishError, PublishTimeoutError
from ludic.inference.vllm.endpoints import VllmEndpoints

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Version = str | int | None
ABANDONED = "the push was abandoned, and no server loaded anything of it"
STAY_PAUSED = "these may stay paused, and then answer nothing until the next push"


def server_urls(client: Any) -> list[str]:
    """Where a client's servers are: its `server_urls`, or its one `server_url`; a URL, or
    several, stand for themselves."""
    if isinstance(client, str):
        return [client]
    if isinstance(client, Sequence):
        return [url for one in client for url in server_urls(one)]
    several = getattr(client, "server_urls", None)
    return [str(url) for url in several] if several else [str(client.server_url)]


def request_headers(client: Any) -> dict[str, str]:
    """What a client sends with everything that it asks of its servers, as its key; none for
    URLs."""
    session = getattr(client, "_session", None)
    return {} if session is None else dict(session.headers)


class VllmControlPlane:
    """Tells the servers what comes, and makes it what they serve.

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
    ) -> None:
        """`master_address` is where the servers reach the trainer; `timeout_s` limits each
        transfer.

        tolerate_lost_servers: go on with the others where a server fails; it is taken out of
        service. By default that is an error. partial: weights may be missing in a push: frozen
        ones, whose values the server has. by_folder: weights go through folders that the servers
        see; no connection is opened.
        """
        headers = request_headers(client)
        self.links = [
            ServerLink(
                VllmEndpoints(url, headers=headers), master_address=master_address, timeout_s=timeout_s, by_folder=by_folder
            )
            for url in server_urls(client)
        ]
        if not self.links:
            raise ConfigError("there is no server to publish to; give a client with server_url, or URLs")
        self.tolerate_lost_servers = tolerate_lost_servers
        self.partial = partial
        self.timings: dict[str, float] = {}
        """Seconds of the last push: `transfer_s`, during which generation waits, and `paused_s`,
        from pause to resume."""
        self.version: str | None = None
        """The last that was loaded."""
        self._live: list[ServerLink] = []
        self._open = False
        self._began_at = 0.0
        self._sent: dict[str, str] = {}
        self._served: dict[str, str] = {}
        self._client: Any = None if isinstance(client, str | Sequence) else client
        if self._client is not None:
            self._client._weight_control = self  # where VllmTensorCommunicator(client) finds the connections

    @property
    def live(self) -> list[ServerLink]:
        """The servers of the push that is going on."""
        return self._live

    @property
    def drained(self) -> list[str]:
        """Servers that were taken out of service."""
        return [link.url for link in self.links if link.drained]

    def prepare(self) -> ServerManifest:
        """Connect to every server where that is needed; what their model looks like."""
        self._live = list(self.links)
        self._each(ServerLink.prepare, "no push was begun")
        manifest, *others = [link.manifest for link in self._live]
        assert manifest is not None
        if any(other != manifest for other in others):
            raise PublishError(
                f"the servers {urls(self._live)} serve models of different shapes or dtypes; serve the same on all"
            )
        return manifest

    def expect(self, sent: Mapping[str, str], served: Mapping[str, str] | None = None) -> None:
        """Fingerprints of the next push, and of what each server must hold once it is loaded,
        where that is another dtype."""
        self._sent, self._served = dict(sent), dict(sent if served is None else served)

    def serves(self, marks: Mapping[str, str]) -> bool:
        """Whether every server still has what was pushed with these fingerprints: none was
        restarted, or given others."""
        version = str(self.version)
        return not on_each(self._live, lambda link: link.check_held(version, marks, marks))

    def rename(self, version: Version) -> None:
        """Call what is served `version`, without a push."""
        name = _name_of(version)
        self._each(lambda link: link.endpoints.set_weight_version(name), f"version {version} was not published")
        self.version, self.timings = name, {}
        self._tell_client()

    def announce_update_batch(self, metadata: list[WeightMetadata], version: Version = None) -> None:
        """Begin a push of these tensors, which follow in this order."""
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
        """Begin a push of the safetensors in a folder that the servers see under the same path."""
        self._begin({"path": str(folder)}, version)

    def _begin(self, update_info: Mapping[str, Any], version: Version) -> None:
        self._open, self._began_at = True, time.perf_counter()
        self._each(lambda link: link.begin(update_info), _not_published(version))

    def send(self, tensor: Tensor) -> None:
        """Broadcast a tensor to every server of the push."""
        self._each(lambda link: link.send(tensor), ABANDONED)

    def wait_staged(self) -> None:
        """Until every server has all of the push."""
        self._each(ServerLink.wait_staged, ABANDONED)

    def finalize_update(self, version: Version = None) -> None:
        """Load what came on every server, under this version. From pause to resume, Ctrl-C waits
        until it is done."""
        self.wait_staged()
        self.timings = {"transfer_s": time.perf_counter() - self._began_at}
        self._open = False  # whatever is raised here, there is nothing to take back while servers load
        to_the_end(lambda: self._switch(version), what="the push")

    def _switch(self, version: Version) -> None:
        """Pause, load, resume. A server resumes with what it had or with what was sent, and with
        nothing cached of other weights."""
        name = _name_of(version)
        paused_at = time.perf_counter()
        self._pause(version)
        failures = on_each(self._live, lambda link: link.commit(name, self._sent, self._served))
        failures |= on_each([link for link in self._live if link not in failures], ServerLink.resume)
        on_each(list(failures), ServerLink.drain)
        self.timings["paused_s"] = time.perf_counter() - paused_at
        self._live = [link for link in self._live if link not in failures]
        self.version = name if self._live else self.version
        self._tell_client()
        if failures:
            self._report_lost(name, failures)

    def _pause(self, version: Version) -> None:
        """Pause all, or let all go on and raise."""
        try:
            self._each(ServerLink.pause, _not_published(version))
        except PublishError as error:
            self._open = True
            stuck = on_each(self._live, ServerLink.resume)
            if stuck:
                self._tell_client(lost=[link.url for link in stuck])
                raise _publish_error(f"{error}; {STAY_PAUSED}: {failed_servers(stuck)}", stuck) from error
            raise

    def _tell_client(self, lost: Sequence[str] = ()) -> None:
        """Which version it samples from now. It finds in `drained`, and in `lost`, whom not to
        ask."""
        if (self.version is not None or lost) and hasattr(self._client, "weights_changed"):
            self._client.weights_changed(self.version, lost=lost)

    def _report_lost(self, version: str, failures: Mapping[ServerLink, Exception]) -> None:
        message = (
            f"version {version} is served by {urls(self._live)}; taken out of service: {failed_servers(failures)}. Restart those: they "
            "answer nothing until then"
        )
        if not (self.tolerate_lost_servers and self._live):
            raise _publish_error(message, failures)
        logger.error("%s", message)

    def abandon_update(self) -> None:
        """Take back a push that is not loaded anywhere."""
        if self._open:
            self._open = False
            failures = on_each(self._live, ServerLink.abandon)
            if failures:
                logger.warning("the push was not taken back everywhere: %s", failed_servers(failures))

    def close(self) -> None:
        """Leave all groups; the servers keep their weights."""
        for link in self.links:
            link.close()

    def _each(self, step: Callable[[ServerLink], Any], otherwise: str) -> None:
        """Take a step on all servers of the push. Where one fails, it is lost or the push is, as
        was asked for."""
        failures = on_each(self._live, step)
        if not failures:
            return
        remaining = [link for link in self._live if link not in failures]
        if not (self.tolerate_lost_servers and remaining):
            raise _publish_error(f"{otherwise}: {failed_servers(failures)}", failures)
        logger.error("going on without %s", failed_servers(failures))
        on_each(list(failures), ServerLink.drain)
        self._live = remaining


def _publish_error(message: str, failures: Mapping[ServerLink, Exception]) -> PublishError:
    """With the first failure as its cause."""
    causes = list(failures.values())
    error = PublishTimeoutError(message) if all(isinstance(cause, TimeoutError) for cause in causes) else PublishError(message)
    error.__cause__ = causes[0]
    return error


def _name_of(version: Version) -> str:
    return f"vllm-{time.time_ns()}" if version is None else str(version)


def _not_published(version: Version) -> str:
    return f"version {version} was not published, and no server loaded anything of it"


class VllmTensorCommunicator:
    """Broadcasts to the workers of a client's servers (or of a control plane's). The trainer is
    rank 0."""

    def __init__(self, client: Any) -> None:
        """Raises PublishError where the client has no live connection:
        `VllmControlPlane(client).prepare()` makes one."""
        control = client if isinstance(client, VllmControlPlane) else getattr(client, "_weight_control", None)
        if control is None or not any(link.connected for link in control.links):
            raise PublishError("the client has no connection for weights; VllmControlPlane(client).prepare() opens it")
        self._control: VllmControlPlane = control

    @property
    def rank(self) -> int:
        return 0

    def broadcast(self, tensor: Tensor, src: int) -> None:
        if src != self.rank:
            raise PublishError(f"src ({src}) must be 0, the trainer: servers send no weights")
        self._control.send(tensor)

    def barrier(self) -> None:
        """Until every server has all that was announced."""
        self._control.wait_staged()


class FolderPublisher:
    """Writes each version into a folder, and tells the servers to read it."""

    def __init__(self, control: VllmControlPlane, folders: CheckpointFolder) -> None:
        self.control = control
        self.folders = folders

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        written = self.folders.write(state_dict, version)
        try:
            self.control.announce_folder(written, version)
            self.control.finalize_update(version)
        except BaseException:
            self.control.abandon_update()
            raise
        self.folders.prune(written)


class CheckedPublisher:
    """Publishes what fits the servers, and what is new. Where nothing is, what they serve is
    called by the new version."""

    def __init__(self, control: VllmControlPlane, inner: PolicyPublisher, *, allow_unchanged: bool = False) -> None:
        self.control = control
        self.inner = inner
        self._unchanged = UnchangedWeights("weights", allowed=allow_unchanged)

    def expect_change(self, expected: bool) -> None:
        self._unchanged.change_expected = expected

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint

        manifest = self.control.prepare()
        weights = fitted(state_dict, manifest, partial=self.control.partial)
        marks = fingerprint(weights)
        if self._unchanged.are(marks, version, dtype=manifest.dtype) and self.control.serves(marks):
            self.control.rename(version)
        else:
            self._unchanged.forget()
            self.control.expect(marks)
            self.inner.publish(weights, version=version)
        self._unchanged.published(marks, version)


class VllmPublisherAdapter:
    """Gives weights the names of the checkpoint that the server loaded, then publishes them."""

    def __init__(self, inner: PolicyPublisher, *, debug: bool = False) -> None:
        """`debug` logs names and seconds of each push."""
        self.inner = inner
        self.debug = debug

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        began = time.perf_counter()
        self.inner.publish(_transform_hf_to_vllm(state_dict, debug=self.debug), version=version)
        if self.debug:
            logger.info("version %s was published in %.3f s", version, time.perf_counter() - began)

    def expect_change(self, expected: bool) -> None:
        if isinstance(self.inner, LearningPublisher):
            self.inner.expect_change(expected)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the last push, by phase."""
        control = getattr(self.inner, "control", None)
        return dict(control.timings) if control is not None else {}


def _transform_hf_to_vllm(state_dict: Mapping[str, Tensor], *, debug: bool = False) -> dict[str, Tensor]:
    """Names as in the checkpoint. Nothing is fused: the server does that when it loads."""
    renamed = checkpoint_names(state_dict)
    if debug:
        logger.info("publishing %d tensors of %d: %s", len(renamed), len(state_dict), sorted(renamed))
    return renamed


def create_vllm_publisher(
    client: Any,
    *,
    debug: bool = False,
    rank0_only: bool = False,
    directory: str | Path | None = None,
    partial: bool = False,
    allow_unchanged: bool = False,
    tolerate_lost_servers: bool = False,
    master_address: str = "127.0.0.1",
    timeout_s: float = 60.0,
) -> PolicyPublisher:
    """A publisher for the servers of a client, over the backend that they were started with: gloo,
    ludic_nccl or disk.

    client: one with `server_url`, or with `server_urls`; or URLs. rank0_only: for calls from every
    rank; other ranks than 0 do nothing, and nothing is opened before the first push. directory:
    pass weights through folders in it instead, which the servers must see under the same path.
    partial: some weights are frozen and not published. By default every weight of the server's
    model must be there. allow_unchanged: push weights that equal those published before. By default
    they are not sent: what is served is called by the new
        version, with a warning, and 20 times in a row are an error.
    tolerate_lost_servers: of several, go on with those that are left. By default a lost one is an
    error. master_address: where the servers reach this process.
    """

    def make() -> PolicyPublisher:
        control = VllmControlPlane(
            client,
            master_address=master_address,
            timeout_s=timeout_s,
            tolerate_lost_servers=tolerate_lost_servers,
            partial=partial,
            by_folder=directory is not None,
        )
        control.prepare()
        inner: PolicyPublisher
        if directory is not None:
            inner = FolderPublisher(control, CheckpointFolder(directory))
        else:
            inner = BroadcastPolicyPublisher(control, VllmTensorCommunicator(control), src_rank=0)
        return VllmPublisherAdapter(CheckedPublisher(control, inner, allow_unchanged=allow_unchanged), debug=debug)

    return Rank0OnlyPublisher(make) if rank0_only else make()
