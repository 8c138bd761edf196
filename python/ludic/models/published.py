"""The weights that a policy server needs, by name: the trained ones, with adapters merged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ludic.models.adapters import list_merged
from ludic.models.shard_transfer import SharedTensor
from ludic.models.sharding import gather_tensor, reshard
from ludic.models.wrappers import has_adapters, unwrap_model

ParamFilter = Callable[[str, Tensor], bool]
"""Whether a parameter of this name is published."""


def published_weights(
    model: nn.Module, *, param_filter: ParamFilter | None = None, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Detached parameters by name: the trainable ones, or for a model with adapters all parameters
    of its base model.

    They share the model's memory, except merged weights, which are copies. The model is not
    changed.
    """
    published = _list_published(model, param_filter)
    return {name: _export(make(), device) for name, (_, make) in published.items()}


def shared_weights(model: nn.Module, *, param_filter: ParamFilter | None = None) -> dict[str, SharedTensor]:
    """`published_weights` of a sharded model, of which no rank has any whole yet. Adapters are
    merged when a tensor is sent."""
    return {name: SharedTensor.of(parameter, make) for name, (parameter, make) in _list_published(model, param_filter).items()}


def _list_published(model: nn.Module, param_filter: ParamFilter | None) -> dict[str, tuple[Tensor, Callable[[], Tensor]]]:
    """Name -> (a tensor that looks like the published one, what makes that)."""
    model = unwrap_model(model)
    reshard(model)
    named: dict[str, Tensor] = dict(model.named_parameters())
    if has_adapters(model):
        published = list_merged(model, named)
    else:
        published = {name: (value, value.detach) for name, value in named.items() if value.requires_grad}
    return {name: (like, make) for name, (like, make) in published.items() if param_filter is None or param_filter(name, like)}


def _export(parameter: Tensor, device: torch.device | str | None) -> Tensor:
    whole = gather_tensor(parameter.detach())
    return whole if device is None else whole.to(device)
