"""The weights that a policy server needs, by name: the trained ones, with adapters merged; and
copies of them into a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.models.adapters import list_merged, map_base_names, merge_adapters
from ludic.models.lora import collect_adapter_weights
from ludic.models.quantization import find_quantized_layers, replace_quantized
from ludic.models.shard_transfer import SharedTensor
from ludic.models.sharding import gather_tensor, reshard
from ludic.models.wrappers import has_adapters, unwrap_model

ParamFilter = Callable[[str, Tensor], bool]
"""Whether a parameter of this name is published."""


def adapters_alone(name: str, parameter: Tensor) -> bool:
    """As a `param_filter` it selects the adapters, by their names in PEFT's file, instead."""
    return True


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


def has_frozen_weights(model: nn.Module) -> bool:
    """Whether weights are left out by `published_weights`, so that a server keeps its own."""
    return not has_adapters(model) and not all(parameter.requires_grad for parameter in model.parameters())


def _list_published(model: nn.Module, param_filter: ParamFilter | None) -> dict[str, tuple[Tensor, Callable[[], Tensor]]]:
    """Name -> (a tensor that looks like the published one, what makes that)."""
    model = unwrap_model(model)
    reshard(model)
    named: dict[str, Tensor] = dict(model.named_parameters())
    if param_filter is adapters_alone:
        published = {name: (value, value.detach) for name, value in collect_adapter_weights(model).items()}
    elif has_adapters(model):
        published = list_merged(model, named)
    else:
        published = {name: (value, value.detach) for name, value in named.items() if value.requires_grad}
    return {name: (like, make) for name, (like, make) in published.items() if param_filter is None or param_filter(name, like)}


def _export(parameter: Tensor, device: torch.device | str | None) -> Tensor:
    whole = gather_tensor(parameter.detach())
    return whole if device is None else whole.to(device)


def copy_weights(model: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Copy each tensor into the weight of its name, unless both share memory.

    Names and shapes are checked before the first copy. Raises ConfigError for an unknown name or a
    wrong shape, and for a model with adapters that is not the trainer's own, because merged weights
    cannot be copied into it.
    """
    own = _check_weights(model, params)
    if has_adapters(model):
        _check_is_trainers(own, params)
        return
    for name, new in params.items():
        _copy(own[name], new)


def copy_streamed_weights(model: nn.Module, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """`copy_weights` of weights that come one tensor at a time; `described` has their shapes."""
    own = _check_weights(model, described)
    is_adapted = has_adapters(model)
    for name, new in weights:
        if is_adapted:
            _check_is_trainers(own, {name: new})
        else:
            _copy(own[name], new)


@torch.no_grad()
def _copy(own: Tensor, new: Tensor) -> None:
    if own.data_ptr() != new.data_ptr():
        own.copy_(new)


def _check_weights(model: nn.Module, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the model without adapters. Raises ConfigError if
    `params` has a name that they do not have, or another shape."""
    own: dict[str, Tensor] = {  # a tied weight is under each of its names
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    if has_adapters(model):
        own = {plain: own[name] for plain, name in map_base_names(model, own).items()}
    for name, new in params.items():
        if name not in own:
            raise ConfigError(f"the model has no weight {name!r}; publish names as model.named_parameters() gives them")
        if own[name].shape != new.shape:
            raise ConfigError(f"weight {name!r} has shape {tuple(new.shape)}, the model's is {tuple(own[name].shape)}")
    return own


def copy_for_sampling(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """A copy without gradients, with merged adapters and no quantised weights, on `device` and in
    `dtype` unless these are None."""
    copied: Any = copy.deepcopy(model)
    if find_quantized_layers(model):
        copied = _replace_quantized(model, copied)
    elif hasattr(copied, "merge_and_unload"):
        copied = copied.merge_and_unload()
    own: nn.Module = copied.requires_grad_(False).to(device=device, dtype=dtype)
    own.zero_grad(set_to_none=True)
    return own


@torch.no_grad()
def _replace_quantized(model: nn.Module, copied: Any) -> nn.Module:
    """`copied`, a copy of the model, with dequantised weights and merged adapters."""
    plain = replace_quantized(copied.unload() if has_adapters(copied) else copied)
    own = dict(plain.named_parameters(remove_duplicate=False))
    for name, weight in merge_adapters(model, dict(model.named_parameters())).items():
        own[name].copy_(weight)
    return plain


def _check_is_trainers(own: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless the published tensors share memory with the model, as the trainer's
    own do except for merged copies."""
    if params and all(own[name].data_ptr() != new.data_ptr() for name, new in params.items()):
        raise ConfigError("merged weights were published to a model with adapters of its own; set copy_model=True")
