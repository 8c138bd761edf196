"""The precision of forward passes, and float32 master copies of half-precision parameters. The
optimizer steps the masters; the model computes in its own dtype.

A bfloat16 number has 8 significant bits: an update below 1/512 of a weight rounds to nothing, and
at the learning rates of post-training nearly every update is that small. The masters keep what
rounding drops (Micikevicius et al., arXiv:1710.03740, section 3.1).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.training.config import TrainerConfig

HALF_PRECISION = (torch.bfloat16, torch.float16)
MASTER = "master"
"""The key of the master in the state that the optimizer's state dict has for a parameter."""


def autocast(cfg: TrainerConfig) -> AbstractContextManager[Any]:
    """A context in which forward passes run in bfloat16 if `mixed_precision_dtype` is set."""
    if cfg.mixed_precision_dtype is None:
        return nullcontext()
    return torch.autocast(torch.device(cfg.model_device).type, dtype=torch.bfloat16)


class MasterWeights:
    """Replaces the half-precision parameters of `optimizer` by float32 masters. Float32 parameters
    stay.

    >>> masters = MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-5))
    >>> loss.backward()
    >>> masters.move_gradients()   # from the parameters to the masters, in float32
    >>> masters.optimizer.step()
    >>> masters.write_back()       # round the masters into the parameters

    The state dict of the optimizer includes the masters, and loading it restores them; masters that
    it lacks are copied from the weights. A weight that was set by other code since the last step is
    copied into its master. Sharded parameters (DTensor) have sharded masters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, enabled: bool = True) -> None:
        """With `enabled=False` nothing is replaced, and masters in a loaded state are dropped."""
        self.optimizer = optimizer
        self._masters: dict[Tensor, Tensor] = {}
        """Parameter -> master."""
        for group in optimizer.param_groups if enabled else []:
            for index, parameter in enumerate(group["params"]):
                if parameter.dtype in HALF_PRECISION:
                    self._masters[parameter] = group["params"][index] = nn.Parameter(parameter.detach().float())
        optimizer.register_state_dict_post_hook(self._add_masters)
        optimizer.register_load_state_dict_pre_hook(self._load_masters)

    def stepped_tensor(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer steps for `parameter`: its master, or `parameter`."""
        return self._masters.get(parameter, parameter)

    @torch.no_grad()
    def move_gradients(self) -> None:
        """Add the gradients of the parameters to their masters' gradients, in float32, and clear
        them."""
        for parameter, master in self._masters.items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def copy_changed_weights(self) -> None:
        """Copy the weights that were set since `write_back` into their masters."""
        for parameter, master in self._masters.items():
            unchanged = master.to(parameter.dtype) == parameter
            master.copy_(torch.where(unchanged, master, parameter.float()))

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the parameters."""
        for parameter, master in self._masters.items():
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for master in self._masters.values():
            master.grad = None

    def _by_index(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Index in the optimizer's state dict -> (parameter, master)."""
        parameters = {master: parameter for parameter, master in self._masters.items()}
        stepped = [value for group in self.optimizer.param_groups for value in group["params"]]
        return {index: (parameters[value], value) for index, value in enumerate(stepped) if value in parameters}

    def _add_masters(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self.copy_changed_weights()
        state = state_dict["state"]
        for index, (_, master) in self._by_index().items():
            state[index] = {**state.get(index, {}), MASTER: master.detach()}

    @torch.no_grad()
    def _load_masters(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = state_dict["state"]
        for index, (parameter, master) in self._by_index().items():
            stored = state.get(index, {}).get(MASTER)
            master.copy_(parameter if stored is None else stored)
        # The entry of a parameter that was never stepped must be empty, else the optimizer would
        # not initialize its state.
        without_masters = {
            index: {name: value for name, value in values.items() if name != MASTER} for index, values in state.items()
        }
        return {**state_dict, "state": {index: values for index, values in without_masters.items() if values}}


def check_precision(model: nn.Module) -> None:
    """Raise ConfigError if a trained parameter is float16: without loss scaling its gradients
    underflow."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ConfigError(f"{name} is float16, whose gradients underflow; load the model in bfloat16 or float32")
