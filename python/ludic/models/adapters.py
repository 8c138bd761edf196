"""The weights of a model with adapters under the names of its base model, with the adapters merged
in copies.

Nothing is merged into the model itself: subtracting an adapter again is not exact, and the errors
would accumulate. `merged = base + scaling * B A` is computed in a copy, in the wider of the two
types, and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, MissingExtraError
from ludic.models.names import MERGED_PART, WRAPPING
from ludic.models.quantization import (
    dequantize_weight,
    describe_weight,
    find_quantized_layers,
    is_quantization_state,
    quiet_kernels,
)
from ludic.models.wrappers import has_adapters


def check_frozen(model: nn.Module) -> None:
    """Raise ConfigError for a model with quantised weights and no adapters: nothing of its blocks
    could be trained."""
    if not has_adapters(model) and find_quantized_layers(model):
        raise ConfigError("quantised weights are not trained; add lora.rank=16 (lora_config=LoraSettings(rank=16))")


def require_peft() -> Any:
    """The module `peft`. Raises MissingExtraError if it is not installed."""
    try:
        with quiet_kernels():
            import peft
    except ImportError as error:
        raise MissingExtraError("peft is not installed, and adapters need it; `pip install peft` brings it") from error
    return peft


@torch.no_grad()
def merge_adapters(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters or buffers `named` under their names in the model without adapters.

    Weights that an adapter changes are merged copies; the others are the same tensors, detached.
    Adapter weights and what `modules_to_save` replaces are dropped. Raises ConfigError for adapters
    other than LoRA on layers.
    """
    return {plain: merge() for plain, (_, merge) in list_merged(model, named).items()}


def list_merged(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Callable[[], Tensor]]]:
    """`merge_adapters` without the work: name -> (a tensor like the merged one, what merges it)."""
    adapted, quantized = _find_adapted_modules(model), find_quantized_layers(model)
    listed: dict[str, tuple[Tensor, Callable[[], Tensor]]] = {}
    for name, tensor in named.items():
        plain = find_base_name(name, adapted)
        if plain is None or is_quantization_state(name, quantized):
            continue
        layer = quantized.get(name.removesuffix(".weight"))
        read = tensor.detach if layer is None else functools.partial(dequantize_weight, layer)
        like = tensor if layer is None else describe_weight(layer)
        listed[plain] = (like, functools.partial(_merge, name, read, adapted))
    return listed


def map_base_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Name in the model without adapters -> name in this model."""
    adapted = _find_adapted_modules(model)
    return {plain: name for name in names if (plain := find_base_name(name, adapted)) is not None}


def find_base_name(name: str, adapted: Mapping[str, Any]) -> str | None:
    """The name in the model without adapters; None for what it does not have. `adapted`: the
    modules that PEFT added, by name."""
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


def _find_adapted_modules(model: nn.Module) -> dict[str, Any]:
    """The LoRA layers and wrappers of `modules_to_save`, by name."""
    require_peft()
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    adapted = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            whole_layer = isinstance(module, LoraLayer) and not hasattr(module, "parameter_name")
            if not whole_layer and not isinstance(module, ModulesToSaveWrapper):
                raise ConfigError(f"{name} ({type(module).__name__}) cannot be merged; use LoRA on linear layers")
            adapted[name] = module
    return adapted


@torch.no_grad()
def _merge(name: str, read: Callable[[], Tensor], adapted: Mapping[str, Any]) -> Tensor:
    tensor = read()
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
