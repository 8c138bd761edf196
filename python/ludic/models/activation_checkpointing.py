"""Activation checkpointing: activations are recomputed in the backward pass instead of stored."""

from __future__ import annotations

from typing import Any

from ludic.errors import ConfigError


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass instead of storing them."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # newer and older transformers
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None:
        raise ConfigError(f"{type(model).__name__} has no {names[0]}; leave gradient checkpointing off")
    enable()
    if hasattr(model, "config"):
        model.config.use_cache = False
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
