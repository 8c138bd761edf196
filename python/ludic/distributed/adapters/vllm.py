"""Publishes to running vLLM servers through vLLM's own endpoints for reinforcement learning.

A push has four steps on every server:

1. check the weights against the server's model;
2. stage them, while the server keeps sampling from the old ones;
3. with generation paused, load them and reset the prefix cache;
4. compare the weights that the server now has with those that the trainer sent.

Until all servers have staged everything, any failure leaves the old version on all of them. A
server that fails later is taken out of service and named in the error; it never serves a mix of old
and new weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.distributed.adapters.reward_model import (
    RMPublisherAdapter as RMPublisherAdapter,
    create_rm_publisher as create_rm_publisher,
)
from ludic.distributed.publisher import BroadcastPolicyPublisher, Rank0OnlyPublisher, UnchangedWeights
from ludic.distributed.push.control_plane import VllmControlPlane as VllmControlPlane
from ludic.distributed.push.manifest import (
    ServerManifest,
    StreamToServer,
    VersionFolders,
    cast_to_server,
    has_tied_head,
    rename_to_checkpoint,
)
from ludic.distributed.push.target import as_push_target
from ludic.errors import PublishError
from ludic.inference.client import PolicyPublisher, Publisher, PushTarget, Version, Weights, WeightSource, as_publisher
from ludic.user_objects import forward_members

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class VllmTensorCommunicator:
    """Broadcasts to the workers of the servers of a client or of a control plane. The trainer is
    rank 0."""

    def __init__(self, client: Any) -> None:
        """Raises PublishError if the client has no open connection, as
        `VllmControlPlane(client).prepare()` opens."""
        control = client if isinstance(client, VllmControlPlane) else as_push_target(client).connections
        if not isinstance(control, VllmControlPlane) or not any(link.connected for link in control.links):
            raise PublishError("the client has no connection for weights; VllmControlPlane(client).prepare() opens it")
        self._control = control

    @property
    def rank(self) -> int:
        return 0

    def broadcast(self, tensor: Tensor, src: int) -> None:
        if src != self.rank:
            raise PublishError(f"src ({src}) must be 0, the trainer's rank: servers send no weights")
        self._control.send(tensor)

    def barrier(self) -> None:
        """Wait until every server has staged everything that was announced."""
        self._control.wait_staged()


class VllmPublisher(Publisher):
    """Checks that weights fit the servers, and pushes them if they changed. If they did not, only
    the version that the servers report changes."""

    def __init__(
        self,
        control: VllmControlPlane,
        folders: VersionFolders | None = None,
        *,
        allow_unchanged: bool = False,
        debug: bool = False,
    ) -> None:
        """`folders`: write each version there, where the servers must see it under the same path;
        by default weights are broadcast. `debug` logs the names of the weights and the seconds of
        each push."""
        self.control, self.folders = control, folders
        self.debug = debug
        self.unchanged = UnchangedWeights("weights", allowed=allow_unchanged)

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        from ludic.inference.vllm.in_server.weight_fingerprint import fingerprint

        renamed = _checkpoint_weights(state_dict, debug=self.debug)
        manifest = self.control.prepare()
        weights = cast_to_server(renamed, manifest, partial=self.control.partial)
        self._publish(fingerprint(weights), version, manifest, weights)

    def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        """`publish` in two passes over the weights: the first takes their fingerprints, the second,
        unless they are unchanged, sends them. One bucket of them is in memory at a time."""
        from ludic.inference.vllm.in_server.weight_fingerprint import tensor_fingerprint

        manifest = self.control.prepare()
        if has_tied_head(weights, manifest):
            self.publish(dict(weights), version=version)
            return
        cast = StreamToServer(weights, manifest, partial=self.control.partial)
        fingerprints = {name: tensor_fingerprint(tensor) for name, tensor in cast}
        self._publish(fingerprints, version, manifest, cast)

    def _send(self, weights: Weights | StreamToServer, version: Version) -> None:
        if self.folders is not None:
            if isinstance(weights, StreamToServer):
                folder = self.folders.write_stream(weights, version)
            else:
                folder = self.folders.write(weights, version)
            self.control.push_folder(folder, version)
            self.folders.prune(folder)
            return
        sender = BroadcastPolicyPublisher(self.control, VllmTensorCommunicator(self.control), src_rank=0)
        if isinstance(weights, StreamToServer):
            sender.publish_stream(weights, version)
        else:
            sender.publish(weights, version)

    def _publish(
        self,
        fingerprints: Mapping[str, str],
        version: Version,
        manifest: ServerManifest,
        weights: Weights | StreamToServer,
    ) -> None:
        start = time.perf_counter()

        def push() -> None:
            self.control.expect(fingerprints)
            self._send(weights, version)

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


@forward_members("inner", ["expect_change", "close", "timings"])
class VllmPublisherAdapter(Publisher):
    """Renames weights as in the server's checkpoint, then publishes them with another
    publisher."""

    def __init__(self, inner: PolicyPublisher, *, debug: bool = False) -> None:
        """`debug` logs the names of the weights and the seconds of each push."""
        self.inner = as_publisher(inner)
        self.debug = debug

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        start = time.perf_counter()
        self.inner.publish(_checkpoint_weights(state_dict, debug=self.debug), version=version)
        if self.debug:
            _log_seconds(version, start)


def _checkpoint_weights(state_dict: Weights, *, debug: bool) -> dict[str, Tensor]:
    """The weights under their names in the checkpoint. Layers are not fused here: the server does
    that when it loads them."""
    renamed = rename_to_checkpoint(state_dict)
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

    client: an object with `server_url` or `server_urls`, or URLs.
    debug: log the names of the weights and the seconds of each push.
    rank0_only: for calls from every rank: ranks other than 0 do nothing, and no connection is
        opened before the first push.
    directory: pass weights through folders in it instead of a connection. The servers must see it
        under the same path.
    partial: frozen weights may be left out of a push. By default a push must have every weight of
        the server's model.
    allow_unchanged: push weights even if they equal the last ones. By default they are not sent:
        the servers only change the version that they report, with a warning, and the 20th time in a
        row is an error.
    tolerate_lost_servers: continue with the remaining servers when one is lost. By default that is
        an error.
    master_address: the address at which the servers reach this process.
    timeout_s: limit of each transfer.
    """

    def make_publisher() -> VllmPublisher:
        control = VllmControlPlane(
            client,
            master_address=master_address,
            timeout_s=timeout_s,
            tolerate_lost_servers=tolerate_lost_servers,
            partial=partial,
            by_folder=directory is not None,
        )
        control.prepare()
        folders = None if directory is None else VersionFolders(directory)
        return VllmPublisher(control, folders, allow_unchanged=allow_unchanged, debug=debug)

    return Rank0OnlyPublisher(make_publisher) if rank0_only else make_publisher()
