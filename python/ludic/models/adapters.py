"""Weights of a model with adapters as those of the model without: names of the base model, adapters
merged in copies.

Nothing is merged into the model itself: taking an adapter out again by subtraction is not exact,
and the error of every cycle would stay. Here `merged = base + scaling * B A` is computed beside it,
in the wider of the two types, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, MissingExtraError
from ludic.models.names import MERGED_PART, WRAPPING


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into the model."""
    return hasattr(model, "peft_config")


def require_peft() -> Any:
    """The module `peft`."""
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("peft is not installed, and adapters need it; `pip install peft` brings it") from error
    return peft


@torch.no_grad()
def without_adapters(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`named` parameters or buffers of the model, under the names that the model without adapters
    has for them.

    Weights that an adapter changes are merged copies; the others are the tensors that were given,
    detached. Adapter weights are left out, and so is what `modules_to_save` replaces. Raises
    ConfigError for adapters other than LoRA on layers.
    """
    adapted = _adapted_modules(model)
    found = ((plain_name(name, adapted), name) for name in named)
    return {plain: _merged(name, named[name].detach(), adapted) for plain, name in found if plain is not None}


def base_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Name in the model without adapters to name in this one."""
    adapted = _adapted_modules(model)
    return {plain: name for name in names if (plain := plain_name(name, adapted)) is not None}


def plain_name(name: str, adapted: Mapping[str, Any]) -> str | None:
    """The name without adapters; None for what only exists with them. `adapted`: modules that
    PEFT put in, by name."""
    place = next((name[:at] for at, char in enumerate(name) if char == "." and name[:at] in adapted), None)
    if place is None:
        return name.removeprefix(WRAPPING)
    kind, _, leaf = name[len(place) + 1 :].partition(".")
    if kind == "modules_to_save":
        adapter, _, leaf = leaf.partition(".")
        if adapter not in adapted[place].active_adapters:
            return None
    elif kind != "base_layer":
        return None
    return f"{place}.{leaf}".removeprefix(WRAPPING)


def _adapted_modules(model: nn.Module) -> dict[str, Any]:
    """LoRA layers, and wrappers of `modules_to_save`."""
    require_peft()
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    adapted = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            whole_layer = isinstance(module, LoraLayer) and not hasattr(module, "parameter_name")
            if not whole_layer and not isinstance(module, ModulesToSaveWrapper):
                raise ConfigError(
                    f"{name} has an adapter ({type(module).__name__}) that cannot be merged beside the model; use LoRA on linear layers"
                )
            adapted[name] = module
    return adapted


def _merged(name: str, tensor: Tensor, adapted: Mapping[str, Any]) -> Tensor:
    place, _, leaf = name.rpartition(MERGED_PART)
    layer = adapted.get(place)
    if layer is None or layer.merged:
        return tensor
    merged = tensor
    for adapter in layer.active_adapters:
        if leaf == "weight" and (adapter in layer.lora_A or adapter in layer.lora_embedding_A):
            variant = layer.lora_variant.get(adapter)
            if variant is None:
                merged = (merged + layer.get_delta_weight(adapter)).to(tensor.dtype)
            else:
                merged = variant.merge_safe(layer, adapter, merged.clone())
        elif leaf == "bias" and layer.lora_bias.get(adapter, False):
            merged = (merged + layer.lora_B[adapter].bias * layer.scaling[adapter]).to(tensor.dtype)
    return merged
