"""Optimizers by name (`TrainerConfig.optimizer`), except AdamW.

Of sharded weights, AdamW steps each rank's part. The others compute from whole matrices, and those
of torch 2.13 refuse sharded ones: every rank gathers one weight at a time with its gradient and
state, steps it whole, and keeps its part. The result equals the step of one process. State of
another shape than its weight, as of Adafactor, is whole on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ludic.errors import ConfigError
from ludic.models.heads import find_head_parts, is_in_module
from ludic.models.names import HEAD_NAMES
from ludic.models.quantization import require_bitsandbytes
from ludic.models.sharding import find_own_region, gather_tensor, get_local, make_shard
from ludic.models.wrappers import unwrap_transformer
from ludic.training.config import TrainerConfig
from ludic.user_objects import import_named


class _WholeSteps(torch.optim.Optimizer):
    """Optimizers as one: their groups, one after the other, and the state of all."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = [(part, len(part.param_groups)) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all weights that have a gradient. Sharded weights: all ranks call it."""
        groups = iter(self.param_groups)
        for part, count in self._parts:
            own = [next(groups) for _ in range(count)]
            if isinstance(part, torch.optim.AdamW):
                part.state, part.param_groups = self.state, own
                part.step()
                continue
            for group, parameter in ((some, each) for some in own for each in some["params"] if each.grad is not None):
                self._step_whole(part, group, parameter)

    def _step_whole(self, part: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        whole, is_shared = parameter, isinstance(parameter, DTensor)
        if is_shared and parameter.grad is not None:
            whole = nn.Parameter(gather_tensor(parameter))
            whole.grad = gather_tensor(parameter.grad)
        state = {name: gather_tensor(value) for name, value in self.state[parameter].items()}
        part.state = defaultdict(dict, {whole: state} if state else {})
        part.param_groups = [{**group, "params": [whole]}]
        part.step()
        self.state[parameter] = part.state[whole]
        if is_shared:
            own = tuple(slice(start, stop) for start, stop in find_own_region(parameter))
            get_local(parameter).copy_(whole[own])
            for name, value in part.state[whole].items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    self.state[parameter][name] = make_shard(value[own].clone(), parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, which gives all state the dtype of its weight; here it keeps its own."""
        super().load_state_dict(state_dict)
        for number, parameter in enumerate(parameter for group in self.param_groups for parameter in group["params"]):
            for name, value in state_dict["state"].get(number, {}).items():
                now = self.state[parameter].get(name)
                if isinstance(now, Tensor) and now.dtype != value.dtype:
                    self.state[parameter][name] = value.to(now.device)


class Muon(_WholeSteps):
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) for `hidden_matrices`, as
    `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`; AdamW for all other weights.

    A matrix [n, m] moves by lr * 0.2 * sqrt(max(n, m)) * NS(u), where u is the Nesterov momentum
    (0.95) of its gradient, and NS are 5 steps of Newton and Schulz in bfloat16, towards the nearest
    semi-orthogonal matrix. The factor gives updates the size of AdamW's (Liu et al.,
    arXiv:2502.16982, section 2.2), so that `lr` and `weight_decay` are AdamW's.
    """


class Adafactor(_WholeSteps):
    """Adafactor (Shazeer and Stern, arXiv:1804.04235), as `torch.optim.Adafactor`: of a matrix
    [n, m] it has n + m numbers of state. `lr` is relative: a weight moves by min(lr, 1 / sqrt(t))
    times its own root mean square, or 0.001 if that is more. `betas` and `eps` are not used."""


class AdamW8bit(_WholeSteps):
    """AdamW of bitsandbytes, with moments of 8 bits in blocks of 256 (Dettmers et al.,
    arXiv:2110.02861). Weights of fewer than 4096 numbers have moments in float32."""


def hidden_matrices(model: nn.Module) -> set[Tensor]:
    """The trained weights of two dimensions, adapters too, outside the embeddings, the
    output layer, and the head of a model that scores."""
    output = getattr(unwrap_transformer(model), "get_output_embeddings", lambda: None)()
    outer = find_head_parts(model) + [
        name.removesuffix(".base_layer")  # of PEFT
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or module is output or name.rpartition(".")[2] in HEAD_NAMES
    ]
    return {
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and not any(is_in_module(name, each) for each in outer)
    }


def find_own(name: str) -> Any:
    """Your own factory, or the class of bitsandbytes; None for an optimizer of torch."""
    if ":" in name:
        return import_named(name, "trainer.optimizer")
    return require_bitsandbytes().optim.AdamW8bit if name == "adamw8bit" else None


def make_optimizer(model: nn.Module, cfg: TrainerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that `cfg` names. `groups`: see `parameter_groups`; your own factory makes its
    groups itself. Raises ConfigError, also where bitsandbytes has no kernel for the device."""
    rates: dict[str, Any] = {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
    adam: dict[str, Any] = {**rates, "betas": cfg.betas, "eps": cfg.eps}
    own = find_own(cfg.optimizer)
    if cfg.optimizer == "adafactor":
        return Adafactor(torch.optim.Adafactor(groups, **rates))
    if cfg.optimizer == "muon":
        hidden = hidden_matrices(model)
        # AdamW's come first: the rate of the first group is logged, which is to be the head's.
        others, matrices = (
            [{**group, "params": [each for each in group["params"] if (each in hidden) == inside]} for group in groups]
            for inside in (False, True)
        )
        return Muon(torch.optim.AdamW(others, **adam), torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **rates))
    if cfg.optimizer == "adamw8bit":
        trial = nn.Parameter(torch.zeros(4096, device=get_local(groups[0]["params"][0]).device))
        trial.grad = torch.zeros_like(trial)
        try:
            own([trial]).step()
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(f"optimizer (adamw8bit): bitsandbytes has no kernel for {trial.device}; use adamw") from error
        return AdamW8bit(own(groups, **adam))
    made = own([(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad], cfg)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer ({cfg.optimizer}) returned {type(made).__name__}; it must return a torch.optim.Optimizer")
    return made
