"""LoRA in a recipe: the `lora` section turned into adapters, and where they and what they adapt
lie on disk."""

from __future__ import annotations

from typing import Any

import torch

from ludic.errors import ConfigError
from ludic.models.lora import LoraSettings, apply_lora
from ludic.recipes.schema import LoraSection
from ludic.training.rng import preserved_rng


def build_lora_settings(section: LoraSection) -> LoraSettings | None:
    """None where every weight is trained."""
    if section.rank:
        return LoraSettings(section.rank, section.alpha, section.dropout, section.target_modules)
    if section != LoraSection():
        raise ConfigError("lora.alpha, lora.dropout and lora.target_modules need lora.rank, which is 0: no adapters")
    return None


def add_adapters(model: Any, section: LoraSection, *, seed: int) -> Any:
    """The model with adapters whose first weights follow from the seed alone, or as it is where
    the section asks for none."""
    settings = build_lora_settings(section)
    if settings is None:
        return model
    with preserved_rng():
        torch.manual_seed(seed)
        try:
            return apply_lora(model, settings)
        except ConfigError:
            raise
        except ValueError as error:  # PEFT's own, for names that no layer has
            said = " ".join(str(error).split())[:300]
            raise ConfigError(f"lora.target_modules ({section.target_modules or 'all'}): {said}") from error
