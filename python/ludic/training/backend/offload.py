"""Moves models and the state of optimizers from an accelerator to host memory and back, bit for
bit, while a server computes on the accelerator.

Parameters stay the same objects, so that the optimizer, FSDP2 and ties keep them. In host memory
they can be published, saved and loaded; only no pass may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ludic.errors import ConfigError
from ludic.models.quantization import find_quantized_layers

Move = Callable[[Tensor], Tensor]


def is_on_accelerator(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory, which is complete once the device was waited for. A tensor that
    is there already, as it is."""
    if not is_on_accelerator(tensor):
        return tensor
    if tensor.device.type != "cuda" or isinstance(tensor, DTensor):
        return tensor.detach().to("cpu")
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def copy_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on the device."""
    return tensor.detach().to(device, non_blocking=True)


class Offload:
    """Modules, and the optimizer of one of them.

    >>> held = Offload([model, masters], optimizer)
    >>> held.to_host()
    >>> held.to_device("cuda:0")
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None = None) -> None:
        self._modules, self._optimizer = modules, optimizer
        self._state: set[str] = set()
        """Names of the optimizer's state that was on the device: not AdamW's `step`."""

    @torch.no_grad()
    def to_host(self) -> None:
        """Free the memory of the device, for other processes too. Collectives are not needed, and
        all work of this process on the device is waited for. Raises ConfigError for 8-bit layers of
        bitsandbytes, whose weights have two owners."""
        layers = [each for module in self._modules for each in find_quantized_layers(module).items()]
        if two := next((name for name, layer in layers if hasattr(layer, "state")), None):
            raise ConfigError(f"{two} has 8-bit weights of bitsandbytes, which cannot be offloaded; use quantization=int8")
        for state in [] if self._optimizer is None else self._optimizer.state.values():
            self._state |= {name for name, value in state.items() if isinstance(value, Tensor) and is_on_accelerator(value)}
        self._move(copy_to_host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are complete
            torch.cuda.empty_cache()  # freed blocks are torch's until then

    @torch.no_grad()
    def to_device(self, device: torch.device | str) -> None:
        """Move everything back."""
        self._move(lambda tensor: copy_to_device(tensor, device))

    def _move(self, move: Move) -> None:
        for module in self._modules:
            module._apply(move)
            for parameter in module.parameters():
                scales: Any = getattr(parameter, "quant_state", None)  # of bitsandbytes; no module has them
                if scales is not None:
                    _move_scales(scales, move)
        for state in [] if self._optimizer is None else self._optimizer.state.values():
            for name in self._state & state.keys():
                state[name] = move(state[name])


def _move_scales(scales: Any, move: Move) -> None:
    for name, value in vars(scales).items():
        if isinstance(value, Tensor):
            setattr(scales, name, move(value))
    if scales.state2 is not None:
        _move_scales(scales.state2, move)
