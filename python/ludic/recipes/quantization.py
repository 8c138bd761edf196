"""The `quantization` section of a recipe applied to a model."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ludic.errors import ConfigError
from ludic.models.adapters import has_adapters
from ludic.models.quantization import QuantizationSettings, find_quantized_layers, quantize_layers, require_bitsandbytes
from ludic.recipes.quantization_section import QuantizationSection
from ludic.recipes.schema import LoraSection
from ludic.recipes.sharding_section import ShardingSection

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


class QuantizedRecipe(Protocol):
    """A recipe of any command."""

    quantization: QuantizationSection
    lora: LoraSection
    sharding: ShardingSection


def build_quantization(section: QuantizationSection) -> QuantizationSettings | None:
    """The settings of the section; None if nothing is quantised. Raises ConfigError for settings
    without a kind, and for values that do not exist."""
    if section.kind is None:
        if section != QuantizationSection():
            raise ConfigError("quantization.double and quantization.compute_dtype need a kind; set quantization=nf4")
        return None
    if section.compute_dtype is not None and section.compute_dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"quantization.compute_dtype ({section.compute_dtype}) must be one of {', '.join(COMPUTE_DTYPES)}")
    dtype = None if section.compute_dtype is None else getattr(torch, section.compute_dtype)
    return QuantizationSettings(section.kind, section.double, dtype)


def check_quantization(recipe: QuantizedRecipe) -> None:
    """Raise ConfigError for settings that a run cannot follow, before its model is loaded, and
    MissingExtraError for 4 bits without bitsandbytes."""
    settings = build_quantization(recipe.quantization)
    if settings is None:
        return
    if not recipe.lora.rank:
        raise ConfigError(f"quantization={settings.kind}: quantised weights are not trained; add lora.rank=16")
    if recipe.sharding.kind != "none":
        raise ConfigError(
            f"quantization={settings.kind} does not go with sharding.kind={recipe.sharding.kind}: quantised weights are not sharded; leave "
            "one of them out"
        )
    if settings.kind != "int8":
        require_bitsandbytes()


def quantize_base(model: Any, recipe: QuantizedRecipe, device: str | None = None) -> Any:
    """The model, with quantised weights if the recipe asks for them and it has none yet. Layers are
    quantised on `device`, where they stay, so that it never has all weights unquantised."""
    settings = build_quantization(recipe.quantization)
    if settings is not None and not has_adapters(model) and not find_quantized_layers(model):
        quantize_layers(model, settings, device=device)
    return model
