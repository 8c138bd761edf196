"""The precision of forward passes, float32 master copies of half-precision parameters, and the
scale of a float16 loss. The optimizer steps the masters; the model computes in its own dtype.

A bfloat16 number has 8 significant bits: an update below 1/512 of a weight rounds to nothing, and
at the learning rates of post-training nearly every update is that small. The masters keep what
rounding drops (Micikevicius et al., arXiv:1710.03740, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.training.config import TrainerConfig

HALF_PRECISION = (torch.bfloat16, torch.float16)
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
MASTER = "master"
"""The key of the master in the state that the optimizer's state dict has for a parameter."""


def autocast(cfg: TrainerConfig) -> AbstractContextManager[Any]:
    """A context in which forward passes run in the `mixed_precision_dtype`, if it is set."""
    if cfg.mixed_precision_dtype is None:
        return nullcontext()
    return torch.autocast(torch.device(cfg.model_device).type, dtype=AUTOCAST[cfg.mixed_precision_dtype])


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

    @property
    def masters(self) -> list[Tensor]:
        return list(self._masters.values())

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


class LossScale:
    """The factor of the loss of a model that computes in float16, whose small gradients would be 0
    (Micikevicius et al., arXiv:1710.03740, section 3.2); 1 for other models.

    By the rule and the numbers of `torch.amp.GradScaler`: 65536 at first; half after a gradient
    that is not finite, whose step is skipped; twice after 2000 steps in a row. Unlike there it does
    not fall below 1, where a gradient that is not finite is an error. It is kept in the first group
    of the optimizer, and so saved and loaded with it.
    """

    START, GROWTH_INTERVAL = 65536.0, 2000

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, cfg: TrainerConfig) -> None:
        self._optimizer = optimizer
        self.is_on = cfg.mixed_precision_dtype == "fp16" or any(each.dtype == torch.float16 for each in model.parameters())

    @property
    def value(self) -> float:
        return float(self._optimizer.param_groups[0].get("loss_scale", self.START)) if self.is_on else 1.0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale."""
        for gradient in (each.grad for each in parameters if self.is_on and each.grad is not None):
            gradient.mul_(1 / self.value)

    def update(self, *, is_finite: bool) -> bool:
        """Set the scale for the next step. Returns False for a gradient that no scale explains."""
        if not self.is_on or not (is_finite or self.value > 1):
            return is_finite
        group = self._optimizer.param_groups[0]
        steps = group.get("finite_steps", 0) + 1 if is_finite else 0
        factor = 0.5 if not is_finite else 2.0 if steps == self.GROWTH_INTERVAL else 1.0
        group |= {"loss_scale": self.value * factor, "finite_steps": steps % self.GROWTH_INTERVAL}
        return True


def check_precision(model: nn.Module, *, master_weights: bool) -> None:
    """Raise ConfigError if a weight would be stepped in float16: nearly all updates underflow."""
    for name, parameter in model.named_parameters():
        if not master_weights and parameter.requires_grad and parameter.dtype == torch.float16:
            raise ConfigError(f"{name} is float16 and master_weights is False; its updates underflow: leave master_weights on")
