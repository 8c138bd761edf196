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
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.distributed.adapters.reward_model import (
    RMPublisherAdapter as RMPublisherAdapter,
    create_rm_publisher as create_rm_publisher,
)
from ludic.distributed.publisher import BroadcastPolicyPublisher, Rank0OnlyPublisher, UnchangedWeights
from ludic.distributed.push.control_plane import VllmControlPlane as VllmControlPlane
from ludic.distributed.push.delta import Delta, LastPush, write_delta
from ludic.distributed.push.manifest import (
    ServerManifest,
    StreamToServer,
    VersionFolders,
    cast_to_server,
    has_tied_head,
    rename_to_checkpoint,
)
from ludic.distributed.push.target import as_push_target
from ludic.errors import ConfigError, PublishError
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
    """Checks that weights fit the servers, and pushes those that changed: their changed entries if
    that is smaller than all tensors. If none changed, only the version that the servers report
    does."""

    def __init__(
        self,
        control: VllmControlPlane,
        folders: VersionFolders | None = None,
        *,
        deltas: bool = True,
        allow_unchanged: bool = False,
        debug: bool = False,
    ) -> None:
        """`folders`: write each version there, where the servers must see it under the same path;
        by default weights are broadcast. `deltas`: keep the last weights here and at the servers,
        and push what changed. `debug` logs the names of the weights and the seconds of each
        push."""
        self.control, self.folders = control, folders
        self.deltas, self.debug = deltas, debug
        self._last = LastPush()
        self.pushed_bytes = 0
        """Bytes of weights that each server was sent last."""
        self.shares_device = control.sleep_level is not None
        self.unchanged = UnchangedWeights("weights", allowed=allow_unchanged, resent=self.shares_device)

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        renamed = _checkpoint_weights(state_dict, debug=self.debug)
        manifest = self.control.prepare()
        self._publish(cast_to_server(renamed, manifest, partial=self.control.partial), version, manifest)

    def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        """`publish` for gathered weights, one bucket of which is in memory at a time. The first
        pass over them takes their fingerprints and finds what changed; tensors that are sent whole
        are gathered again."""
        manifest = self.control.prepare()
        if has_tied_head(weights, manifest):
            self.publish(dict(weights), version=version)
            return
        self._publish(StreamToServer(weights, manifest, partial=self.control.partial), version, manifest)

    def _publish(self, weights: Weights | StreamToServer, version: Version, manifest: ServerManifest) -> None:
        from ludic.inference.vllm.in_server.weight_fingerprint import tensor_fingerprint

        start = time.perf_counter()
        described, entries = _describe(weights)
        delta = self._last.start_delta(described) if self.deltas and self.control.base == self._last.push_id else None
        fingerprints = {}
        for name, tensor in entries:
            fingerprints[name] = tensor_fingerprint(tensor)
            if delta is not None:
                delta.add(name, tensor)

        def rename() -> None:
            self.control.rename(version)
            self.pushed_bytes = 0

        def push() -> None:
            if delta is None or not delta.is_smaller or not self._push_delta(delta, fingerprints, version):
                self._push_whole(weights, fingerprints, version)

        self.unchanged.publish(
            fingerprints,
            version,
            dtype=manifest.dtype,
            push=push,
            rename=rename,
            still_served=lambda: not self.shares_device and self.control.serves(fingerprints),
        )
        if self.debug:
            _log_seconds(version, start)

    def _push_delta(self, delta: Delta, fingerprints: Mapping[str, str], version: Version) -> bool:
        """Push what changed. Returns False if servers refused it, because they lack its base or got
        it damaged: they keep their weights, and need whole tensors."""
        header, changes = delta.seal()
        self.control.expect(fingerprints, push_id=delta.push_id)
        try:
            if self.folders is None:
                self.control.push_delta(header, changes, version)
            else:
                folder = self.folders.fill(version, lambda folder: write_delta(folder, changes))
                self.control.push_delta(header, folder, version)
                self.folders.prune(folder)
        except PublishError as error:
            if isinstance(error, TimeoutError) or not self._has_lost_base():
                raise
            logger.warning("version %s is pushed whole, since what changed was refused: %s", version, error)
            return False
        self._last.confirm(delta.push_id, delta)
        self.pushed_bytes = delta.bytes
        return True

    def _has_lost_base(self) -> bool:
        """Whether the servers take a push, but not of the last one's changes."""
        try:
            self.control.prepare()
        except PublishError:
            return False
        return self.control.base != self._last.push_id

    def _push_whole(self, weights: Weights | StreamToServer, fingerprints: Mapping[str, str], version: Version) -> None:
        described, entries = _describe(weights)
        push_id = uuid.uuid4().hex if self.deltas else None
        self.control.expect(fingerprints, push_id=push_id)
        if self.deltas:
            self._last.replace(described)
            if isinstance(weights, StreamToServer):
                weights.record = self._last.copy
        self._send(weights, version)
        if push_id is not None:
            if not isinstance(weights, StreamToServer):
                for name, tensor in entries:
                    self._last.copy(name, tensor)
            self._last.confirm(push_id)
        self.pushed_bytes = sum(tensor.nbytes for tensor in described.values())

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

    def sleep(self) -> None:
        self.control.sleep()

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


def _describe(weights: Weights | StreamToServer) -> tuple[Weights, Iterable[tuple[str, Tensor]]]:
    """Tensors with the shapes and dtypes of the weights, and the weights."""
    return (weights.describe(), weights) if isinstance(weights, StreamToServer) else (weights, weights.items())


def _log_seconds(version: Version, start: float) -> None:
    logger.info("version %s was published in %.3f s", version, time.perf_counter() - start)


def create_vllm_publisher(
    client: PushTarget | str | Sequence[Any] | Any,
    *,
    debug: bool = False,
    rank0_only: bool = False,
    directory: str | Path | None = None,
    push: str = "auto",
    partial: bool = False,
    allow_unchanged: bool = False,
    tolerate_lost_servers: bool = False,
    master_address: str = "127.0.0.1",
    timeout_s: float = 60.0,
    sleep_level: int | None = None,
) -> Publisher:
    """A publisher for the servers of a client, over the backend that they were started with: gloo,
    ludic_nccl or disk.

    client: an object with `server_url` or `server_urls`, or URLs.
    debug: log the names of the weights and the seconds of each push.
    rank0_only: for calls from every rank: ranks other than 0 do nothing, and no connection is
        opened before the first push.
    directory: pass weights through folders in it instead of a connection. The servers must see it
        under the same path.
    push: `auto` sends what changed since the last push where that is smaller. For it, this process
        and each worker of the servers keep the pushed weights in host memory. `whole` always sends
        all weights, and keeps none.
    partial: frozen weights may be left out of a push. By default a push must have every weight of
        the server's model.
    allow_unchanged: push weights even if they equal the last ones. By default they are not sent:
        the servers only change the version that they report, with a warning, and the 20th time in a
        row is an error.
    tolerate_lost_servers: continue with the remaining servers when one is lost. By default that is
        an error.
    master_address: the address at which the servers reach this process.
    timeout_s: limit of each transfer.
    sleep_level: the servers share their device with the trainer: `sleep` frees it until the next
        push. 1 keeps their weights in host memory; 2 drops them, for pushes of every weight. None:
        they never sleep. Pushes to servers that sleep are whole.
    """
    if push not in ("auto", "whole"):
        raise ConfigError(f"push ({push!r}) must be 'auto' or 'whole'")

    def make_publisher() -> VllmPublisher:
        control = VllmControlPlane(
            client,
            master_address=master_address,
            timeout_s=timeout_s,
            tolerate_lost_servers=tolerate_lost_servers,
            partial=partial,
            by_folder=directory is not None,
            sleep_level=sleep_level,
        )
        control.prepare()
        folders = None if directory is None else VersionFolders(directory)
        deltas = push == "auto" and sleep_level is None  # a server that sleeps drops what does not come with the push
        return VllmPublisher(control, folders, deltas=deltas, allow_unchanged=allow_unchanged, debug=debug)

    return Rank0OnlyPublisher(make_publisher, shares_device=sleep_level is not None) if rank0_only else make_publisher()
