"""Publishers that work over any control plane and communicator, and one to a model in this process.

A push of unchanged weights changes only the version that the servers report; too many of them in a
row are an error.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ludic.distributed.interfaces import ControlPlane, PolicyPublisher, TensorCommunicator, describe_weights
from ludic.errors import PublishError, on_error
from ludic.inference.client import ChatClient, Publisher, Version, Weights, WeightSource, as_publisher

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class BroadcastPolicyPublisher(Publisher):
    """Announces the tensors, broadcasts them sorted by name, and waits until all receivers have
    them.

    On an error the update is abandoned, if the control plane can do that.
    """

    def __init__(self, control: ControlPlane, comm: TensorCommunicator, src_rank: int) -> None:
        self.control = control
        self.comm = comm
        self.src_rank = src_rank

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        weights = dict(sorted(state_dict.items()))
        self._broadcast(weights, weights.items(), version)

    def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        """Broadcast the tensors in the order in which they are gathered; each is dropped then."""
        self._broadcast(weights.describe(), weights, version)

    def _broadcast(self, described: Weights, weights: Iterable[tuple[str, Tensor]], version: Version) -> None:
        with on_error(getattr(self.control, "abandon_update", lambda: None)):
            self.control.announce_update_batch(describe_weights(described), version=version)
            for _, tensor in weights:
                self.comm.broadcast(tensor.contiguous(), src=self.src_rank)
            self.comm.barrier()
            self.control.finalize_update(version=version)


class Rank0OnlyPublisher(Publisher):
    """Publishes only on rank 0, which makes the inner publisher at the first push. Other ranks
    never make one."""

    def __init__(self, make_inner: Callable[[], PolicyPublisher], *, enabled: bool = True, shares_device: bool = False) -> None:
        """`shares_device`: of the inner one, which all ranks must know before it is made."""
        self._make_inner = make_inner
        self._enabled, self.shares_device = enabled, shares_device
        self._inner: Publisher | None = None
        self._change_expected = True

    def publish(self, state_dict: Weights, version: Version = None) -> Awaitable[None] | None:
        inner = self._inner_of_rank_0()
        return None if inner is None else inner.publish(state_dict, version=version)

    def publish_stream(self, weights: WeightSource, version: Version = None) -> Awaitable[None] | None:
        inner = self._inner_of_rank_0()
        return None if inner is None else inner.publish_stream(weights, version=version)

    def sleep(self) -> Awaitable[None] | None:
        inner = self._inner_of_rank_0()
        return None if inner is None else inner.sleep()

    def _inner_of_rank_0(self) -> Publisher | None:
        """The inner publisher on rank 0, and in a process without a process group; else None."""
        import torch.distributed as dist

        if self._enabled and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            return None
        if self._inner is None:
            self._inner = as_publisher(self._make_inner())
        self._inner.expect_change(self._change_expected)
        return self._inner

    def expect_change(self, expected: bool) -> None:
        """Stored until the next push, because there is no inner publisher before the first."""
        self._change_expected = expected

    def close(self) -> None:
        """Close the inner publisher, if there is one."""
        if self._inner is not None:
            self._inner.close()

    @property
    def timings(self) -> Mapping[str, float]:
        return {} if self._inner is None else self._inner.timings


MOST_IN_A_ROW = 20
"""This many pushes of unchanged weights in a row are an error. Batches without a gradient do not
count, if the trainer reports them."""


class UnchangedWeights:
    """Decides for each push whether the weights have to be sent, by comparing their fingerprints
    with the previous push.

    >>> unchanged = UnchangedWeights("weights")
    >>> unchanged.publish(fingerprints, 17, push=push, rename=rename, still_served=lambda: True)
    """

    def __init__(self, what: str, *, allowed: bool = False, resent: bool = False) -> None:
        """`what` names the weights in messages. `allowed`: push unchanged weights like any
        others. `resent`: the messages say that `rename` sends the weights again."""
        self.what = what
        self.resent = resent
        self.allowed = allowed
        self.change_expected = True
        """Whether there was a gradient since the last push. True unless the trainer reports
        otherwise."""
        self._last: tuple[str, dict[str, str]] | None = None
        self._in_a_row = 0

    def publish(
        self,
        fingerprints: Mapping[str, str],
        version: Version,
        *,
        push: Callable[[], None],
        rename: Callable[[], None],
        still_served: Callable[[], bool],
        dtype: str = "dtype",
    ) -> None:
        """Call `rename` if these are the weights of the last push and the servers still have them,
        else `push`.

        After a failed push, `push` is always called, because it is not known which weights are
        served. `dtype` is the dtype of the published weights, for the message.
        """
        if self.is_repeat(fingerprints, version, dtype=dtype) and still_served():
            rename()
        else:
            self._last = None
            push()
        self._last = (str(version), dict(fingerprints))

    def is_repeat(self, fingerprints: Mapping[str, str], version: Version, *, dtype: str = "dtype") -> bool:
        """Whether these are the weights of the last push under another version; logs a warning if
        so. Under the same version, as after a resume, they are published again.

        Raises PublishError when this happens for the twentieth time in a row, not counting batches
        without a gradient: the trained weights do not reach the servers.
        """
        if self.allowed or self._last is None:
            return False
        last_version, last_fingerprints = self._last
        if str(version) == last_version:
            return False
        if fingerprints != last_fingerprints:
            self._in_a_row = 0
            return False
        self._in_a_row += self.change_expected
        if self._in_a_row >= MOST_IN_A_ROW:
            raise PublishError(
                f"{self._in_a_row} pushes in a row, up to version {version}, did not change the {self.what} in the server's {dtype}; "
                f"raise the learning rate, check the published model, or set allow_unchanged=True"
            )
        logger.warning(
            "the %s of version %s equal the ones of version %s; the servers %s version %s (%s)",
            self.what,
            version,
            last_version,
            "are sent them again, as" if self.resent else "keep them and report",
            version,
            f"{self._in_a_row} of at most {MOST_IN_A_ROW - 1} in a row"
            if self.change_expected
            else "there was no gradient since",
        )
        return True


class LocalPublisher(Publisher):
    """Passes weights to a client's `sync_weights`. A client that samples from the trainer's own
    model copies nothing."""

    def __init__(self, client: ChatClient, *, timeout_s: float = 600.0, shares_model: bool = False) -> None:
        """`shares_model`: the client samples from the trainer's own model, and is only told the
        version; no adapters are merged for it."""
        self.client, self.needs_weights = client, not shares_model
        self.timeout_s = timeout_s

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        self.client.sync_weights(state_dict, timeout_s=self.timeout_s, version=version)

    def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        """Copy each tensor when it arrives, if the client is a `LocalChatClient`; other clients get
        all of them together."""
        from ludic.inference.local.client import LocalChatClient

        if isinstance(self.client, LocalChatClient):
            self.client.sync_weights_from(weights, timeout_s=self.timeout_s, version=version)
        else:
            self.publish(dict(weights), version)
