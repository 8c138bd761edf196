"""Publishes to vLLM servers while they serve, through their own endpoints for reinforcement
learning.

A push to one server or to several has four parts. The weights are checked against each server's
model. All servers stage them and keep the old ones. With generation paused, all load them
and reset their prefix caches. What each server then holds is compared with what the trainer sent.

Until all servers have staged everything, any failure leaves the old version on all of them. A
server that fails later is taken out of service and named in the error; it never serves a mix.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ludic.distributed.adapters.reward_model import (
    RMPublisherAdapter as RMPublisherAdapter,
    create_rm_publisher as create_rm_publisher,
)
from ludic.distributed.publisher import BroadcastPolicyPublisher, Rank0OnlyPublisher
from ludic.distributed.push.control_plane import VllmControlPlane as VllmControlPlane
from ludic.distributed.push.folder import CheckpointFolder
from ludic.distributed.push.manifest import cast_to_server, checkpoint_names
from ludic.distributed.push.target import push_target
from ludic.distributed.unchanged import UnchangedWeights
from ludic.errors import PublishError
from ludic.inference.publishing import PolicyPublisher, Publisher, PushTarget, Version, as_publisher

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class VllmTensorCommunicator:
    """Broadcasts to the workers of a client's servers, or of a control plane's. The trainer is
    rank 0."""

    def __init__(self, client: Any) -> None:
        """Raises PublishError if the client has no live connection, which
        `VllmControlPlane(client).prepare()` makes."""
        control = client if isinstance(client, VllmControlPlane) else push_target(client).connections
        if not isinstance(control, VllmControlPlane) or not any(link.connected for link in control.links):
            raise PublishError("the client has no connection for weights; VllmControlPlane(client).prepare() opens it")
        self._control = control

    @property
    def rank(self) -> int:
        return 0

    def broadcast(self, tensor: Tensor, src: int) -> None:
        if src != self.rank:
            raise PublishError(f"src ({src}) must be 0, the trainer: servers send no weights")
        self._control.send(tensor)

    def barrier(self) -> None:
        """Wait until every server has staged everything that was announced."""
        self._control.wait_staged()


class Transport(Protocol):
    """How the weights of a push reach the servers that the control plane has prepared."""

    def push(self, control: VllmControlPlane, weights: Mapping[str, Tensor], version: Version) -> None: ...


class Broadcast:
    """Through the connections of the control plane, one tensor after the other."""

    def push(self, control: VllmControlPlane, weights: Mapping[str, Tensor], version: Version) -> None:
        BroadcastPolicyPublisher(control, VllmTensorCommunicator(control), src_rank=0).publish(weights, version)


class Folder:
    """Through a folder for each version, which the servers see under the same path."""

    def __init__(self, folders: CheckpointFolder) -> None:
        self.folders = folders

    def push(self, control: VllmControlPlane, weights: Mapping[str, Tensor], version: Version) -> None:
        written = self.folders.write(weights, version)
        control.push_folder(written, version)
        self.folders.prune(written)


class VllmPublisher(Publisher):
    """Checks that weights fit the servers, and pushes them if they changed. If they did not, the
    servers call what they serve by the new version."""

    def __init__(
        self, control: VllmControlPlane, transport: Transport, *, allow_unchanged: bool = False, debug: bool = False
    ) -> None:
        """`debug` logs names and seconds of each push."""
        self.control = control
        self.transport = transport
        self.debug = debug
        self.unchanged = UnchangedWeights("weights", allowed=allow_unchanged)

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint

        start = time.perf_counter()
        renamed = _checkpoint_weights(state_dict, debug=self.debug)
        manifest = self.control.prepare()
        weights = cast_to_server(renamed, manifest, partial=self.control.partial)
        fingerprints = fingerprint(weights)

        def push() -> None:
            self.control.expect(fingerprints)
            self.transport.push(self.control, weights, version)

        self.unchanged.publish(
            fingerprints,
            version,
            dtype=manifest.dtype,
            push=push,
            rename=lambda: self.control.rename(version),
            still_served=lambda: self.control.serves(fingerprints),
        )
        if self.debug:
            _log_seconds(version, start)

    def expect_change(self, expected: bool) -> None:
        self.unchanged.change_expected = expected

    def close(self) -> None:
        self.control.close()

    @property
    def timings(self) -> Mapping[str, float]:
        return dict(self.control.timings)


class VllmPublisherAdapter(Publisher):
    """Renames weights as in the server's checkpoint, then publishes them with another
    publisher."""

    def __init__(self, inner: PolicyPublisher, *, debug: bool = False) -> None:
        """`debug` logs names and seconds of each push."""
        self.inner = as_publisher(inner)
        self.debug = debug

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        start = time.perf_counter()
        self.inner.publish(_checkpoint_weights(state_dict, debug=self.debug), version=version)
        if self.debug:
            _log_seconds(version, start)

    def expect_change(self, expected: bool) -> None:
        self.inner.expect_change(expected)

    def close(self) -> None:
        self.inner.close()

    @property
    def timings(self) -> Mapping[str, float]:
        return self.inner.timings


def _checkpoint_weights(state_dict: Mapping[str, Tensor], *, debug: bool) -> dict[str, Tensor]:
    """The weights under the names of the checkpoint. Nothing is fused: the server does that when
    it loads."""
    renamed = checkpoint_names(state_dict)
    if debug:
        logger.info("publishing %d tensors of %d: %s", len(renamed), len(state_dict), sorted(renamed))
    return renamed


def _log_seconds(version: Version, start: float) -> None:
    logger.info("version %s was published in %.3f s", version, time.perf_counter() - start)


def create_vllm_publisher(
    client: PushTarget | str | Sequence[Any] | Any,
    *,
    debug: bool = False,
    rank0_only: bool = False,
    directory: str | Path | None = None,
    partial: bool = False,
    allow_unchanged: bool = False,
    tolerate_lost_servers: bool = False,
    master_address: str = "127.0.0.1",
    timeout_s: float = 60.0,
) -> Publisher:
    """A publisher for the servers of a client, over the backend that they were started with: gloo,
    ludic_nccl or disk.

    client: one with `server_url`, or with `server_urls`; or URLs.
    debug: log names and seconds of each push.
    rank0_only: for calls from every rank; ranks other than 0 do nothing, and nothing is opened
        before the first push.
    directory: pass weights through folders in it instead, which the servers must see under the same
        path.
    partial: some weights are frozen and not published. By default every weight of the server's
        model must be there.
    allow_unchanged: push weights that equal those published before. By default they are not sent:
        the servers call what they serve by the new version, with a warning, and 20 times in a row
        are an error.
    tolerate_lost_servers: of several, go on with those that are left. By default a lost one is an
        error.
    master_address: where the servers reach this process.
    timeout_s: limit of each transfer.
    """

    def make() -> VllmPublisher:
        control = VllmControlPlane(
            client,
            master_address=master_address,
            timeout_s=timeout_s,
            tolerate_lost_servers=tolerate_lost_servers,
            partial=partial,
            by_folder=directory is not None,
        )
        control.prepare()
        transport = Broadcast() if directory is None else Folder(CheckpointFolder(directory))
        return VllmPublisher(control, transport, allow_unchanged=allow_unchanged, debug=debug)

    return Rank0OnlyPublisher(make) if rank0_only else make()
