"""Copies published weights into a model, by name. A model with adapters and one without understand each other's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError


def copy_weights(model: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Copy each tensor into the weight of its name; one that shares its memory already is left alone.

    A model with adapters takes the adapters and leaves what they are merged into as it is; one without takes merged weights. Names
    and shapes are checked before the first is copied. Raises ConfigError for a name that the model does not have or a shape that
    differs.
    """
    pairs = _matched(model, params)
    with torch.no_grad():
        for own, new in pairs:
            if own.data_ptr() != new.data_ptr():
                own.copy_(new)


def _matched(model: nn.Module, params: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    own: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),  # a tied weight goes by either of its names
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    adapted = hasattr(model, "merge_adapter")
    pairs = []
    for name, new in params.items():
        target = own.get(name)
        if adapted and ".base_layer." in name:
            continue  # never trained; merged in what was published
        if target is None and not adapted:
            if _is_adapter(name):
                _check_merged(name, params)
                continue
            target = own.get(_without_adapters(name))
        if target is None:
            raise ConfigError(f"the model has no weight {name!r}; publish names as model.named_parameters() gives them")
        if target.shape != new.shape:
            raise ConfigError(f"weight {name!r} has shape {tuple(new.shape)}, the model's is {tuple(target.shape)}")
        pairs.append((target, new))
    return pairs


def _is_adapter(name: str) -> bool:
    return "lora_" in name or ".original_module." in name


def _without_adapters(name: str) -> str:
    """The name that this weight has in the model without adapters."""
    name = name.removeprefix("base_model.model.")
    return name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


def _check_merged(name: str, params: Mapping[str, Tensor]) -> None:
    if "lora_" in name and not any(".base_layer." in other for other in params):
        raise ConfigError(
            f"adapter weight {name!r} was published to a model without adapters, and what it is merged into was not; "
            "publish the merged weights too, or give the client a model with adapters"
        )
