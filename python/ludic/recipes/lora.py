"""The `lora` section of a recipe turned into adapters."""

from __future__ import annotations

from typing import Any

import torch

from ludic.errors import ConfigError
from ludic.models.lora import LoraSettings, apply_lora
from ludic.recipes.quantization import QuantizedRecipe, check_quantization, quantize_base
from ludic.recipes.schema import LoraSection
from ludic.training.rng import preserved_rng


def build_lora_settings(section: LoraSection) -> LoraSettings | None:
    """The settings of the section; None if every weight is trained. Raises ConfigError for
    settings without a rank."""
    if section.rank:
        return LoraSettings(section.rank, section.alpha, section.dropout, section.target_modules)
    if section != LoraSection():
        raise ConfigError("lora.alpha, lora.dropout and lora.target_modules need lora.rank, which is 0: no adapters")
    return None


def check_adapters(recipe: QuantizedRecipe) -> None:
    """Raise ConfigError for wrong settings of adapters or of what they adapt, before a model is
    loaded."""
    build_lora_settings(recipe.lora)
    check_quantization(recipe)


def add_adapters(model: Any, recipe: QuantizedRecipe, *, seed: int, device: str | None = None) -> Any:
    """The model with adapters, whose initial weights depend on the seed alone, over weights that
    are quantised if the recipe asks for it, on `device` if one is given; without `lora.rank` the
    model as it is."""
    settings = build_lora_settings(recipe.lora)
    if settings is None:
        return model
    model = quantize_base(model, recipe, device)
    with preserved_rng():
        torch.manual_seed(seed)
        return apply_settings(model, settings)


def apply_settings(model: Any, settings: LoraSettings) -> Any:
    """The model with adapters. Raises ConfigError for layers that PEFT does not find or adapt."""
    try:
        return apply_lora(model, settings)
    except ConfigError:
        raise
    except ValueError as error:
        message = " ".join(str(error).split())[:300]
        raise ConfigError(f"lora.target_modules ({settings.target_modules or 'all'}): {message}") from error
