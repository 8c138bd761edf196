"""The protocols of a push: the control plane announces it, the communicator moves the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from ludic.inference.client import PolicyPublisher as PolicyPublisher

if TYPE_CHECKING:
    from torch import Tensor


class WeightMetadata(TypedDict):
    """What a receiver must know about a tensor before it arrives."""

    name: str
    dtype: str
    shape: Sequence[int]


def describe_weights(weights: Mapping[str, Tensor]) -> list[WeightMetadata]:
    """The metadata of each weight, in this order."""
    return [{"name": name, "dtype": str(like.dtype), "shape": list(like.shape)} for name, like in weights.items()]


@runtime_checkable
class TensorCommunicator(Protocol):
    """Moves tensors between processes."""

    @property
    def rank(self) -> int: ...

    def broadcast(self, tensor: Tensor, src: int) -> None: ...

    def barrier(self) -> None: ...


@runtime_checkable
class ControlPlane(Protocol):
    """Announces an update to the receivers, and ends it. With a method `abandon_update`, it can
    also cancel an announced update: receivers then keep the weights that they have."""

    def announce_update_batch(self, metadata: list[WeightMetadata], version: str | int | None = None) -> Any: ...

    def finalize_update(self, version: str | int | None = None) -> None: ...


WeightPublisher = PolicyPublisher
"""The same for the weights of any model, such as a reward model."""
