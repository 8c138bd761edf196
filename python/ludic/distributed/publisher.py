"""Publishers that work over any control plane and communicator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ludic.distributed.interfaces import (
    AbandoningControlPlane,
    ControlPlane,
    PolicyPublisher,
    TensorCommunicator,
    WeightMetadata,
)
from ludic.inference.publishing import Publisher, Version, WeightSource, as_publisher

if TYPE_CHECKING:
    from torch import Tensor


class BroadcastPolicyPublisher(Publisher):
    """Announces the tensors, broadcasts them sorted by name, and waits until all receivers have
    them.

    On an error the update is abandoned, if the control plane can do that.
    """

    def __init__(self, control: ControlPlane, comm: TensorCommunicator, src_rank: int) -> None:
        self.control = control
        self.comm = comm
        self.src_rank = src_rank

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        names = sorted(state_dict)
        self._broadcast({name: state_dict[name] for name in names}, ((name, state_dict[name]) for name in names), version)

    def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        """Broadcast the tensors in the order in which they are gathered; each is dropped then."""
        self._broadcast(weights.describe(), weights, version)

    def _broadcast(self, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], version: Version) -> None:
        metadata: list[WeightMetadata] = [
            {"name": name, "dtype": str(like.dtype), "shape": list(like.shape)} for name, like in described.items()
        ]
        try:
            self.control.announce_update_batch(metadata, version=version)
            for _, tensor in weights:
                self.comm.broadcast(tensor.contiguous(), src=self.src_rank)
            self.comm.barrier()
            self.control.finalize_update(version=version)
        except BaseException:
            if isinstance(self.control, AbandoningControlPlane):
                self.control.abandon_update()
            raise


class Rank0OnlyPublisher(Publisher):
    """Publishes only on rank 0, which makes the inner publisher at the first push. Other ranks
    never make one."""

    def __init__(self, make_inner: Callable[[], PolicyPublisher], *, enabled: bool = True) -> None:
        self._make_inner = make_inner
        self._enabled = enabled
        self._inner: Publisher | None = None
        self._change_expected = True

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> Awaitable[None] | None:
        return self._inner_of_rank_0().publish(state_dict, version=version) if self._publishes() else None

    def publish_stream(self, weights: WeightSource, version: Version = None) -> Awaitable[None] | None:
        return self._inner_of_rank_0().publish_stream(weights, version=version) if self._publishes() else None

    def _publishes(self) -> bool:
        return not self._enabled or _is_rank_zero()

    def _inner_of_rank_0(self) -> Publisher:
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


def _is_rank_zero() -> bool:
    """Whether this process is rank 0. True without a process group."""
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
