"""Models sharded by FSDP2. Only this module depends on how such models and their tensors look.

`fully_shard` gives a module the methods of `FSDPModule` and makes its parameters DTensors. Every
function here that moves tensors between ranks is a collective: all ranks call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to `model`. It must then not be moved to another device."""
    return hasattr(model, "set_requires_gradient_sync")


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass of a sharded model exchanges gradients between ranks."""
    sharded: Any = model
    sharded.set_requires_gradient_sync(enabled)


def gather_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict of `model`; on the CPU if it is gathered from shards."""
    if not is_sharded(model):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return state


def scatter_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors by name into `model`; each rank loads its shards. Parameters that are not
    in `state` keep their values."""
    if not is_sharded(model):
        model.load_state_dict(state, strict=False)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True, strict=False))


def gather_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a whole tensor that belongs to a sharded parameter. A tensor of another
    shape, such as a step count, stays whole."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)
