"""The weights that a policy server needs, by name: the trained ones, with adapters merged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ludic.models.adapters import has_adapters, merge_adapters
from ludic.models.sharding import gather_tensor

ParamFilter = Callable[[str, Tensor], bool]
"""Whether a parameter of this name is published."""


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside a wrapper such as DistributedDataParallel."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def published_weights(
    model: nn.Module, *, param_filter: ParamFilter | None = None, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Detached parameters by name: the trainable ones, or for a model with adapters all parameters
    of its base model.

    They share the model's memory, except merged weights, which are copies. The model is not
    changed.
    """
    model = unwrap_model(model)
    named: dict[str, Tensor] = dict(model.named_parameters())
    if has_adapters(model):
        published = merge_adapters(model, named)
    else:
        published = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    return {
        name: _export(parameter, device)
        for name, parameter in published.items()
        if param_filter is None or param_filter(name, parameter)
    }


def _export(parameter: Tensor, device: torch.device | str | None) -> Tensor:
    whole = gather_tensor(parameter.detach())
    return whole if device is None else whole.to(device)
