"""The weights that a policy server needs, by name: those trained, with adapters merged into what
they adapt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ludic.models.adapters import has_adapters, without_adapters
from ludic.models.sharding import gather_tensor

ParamFilter = Callable[[str, Tensor], bool]
"""Whether a parameter of this name is published."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a wrapper such as DistributedDataParallel."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def published_weights(
    model: nn.Module, *, param_filter: ParamFilter | None = None, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Parameters by name, detached: the trainable ones, or for a model with adapters all that the
    model without has, under its names.

    They share the model's memory where they can; merged weights are copies. The model is left as it
    is.
    """
    model = unwrapped(model)
    named: dict[str, Tensor] = dict(model.named_parameters())
    if has_adapters(model):
        chosen = without_adapters(model, named)
    else:
        chosen = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    return {
        name: _exported(parameter, device)
        for name, parameter in chosen.items()
        if param_filter is None or param_filter(name, parameter)
    }


def _exported(parameter: Tensor, device: torch.device | str | None) -> Tensor:
    whole = gather_tensor(parameter.detach())
    return whole if device is None else whole.to(device)
