"""Names of weights: of heads that score, and what PEFT adds to the names of what it adapts."""

from __future__ import annotations

HEAD_NAMES = ("score", "classifier", "classification_head", "lm_head", "reward_head", "v_head")
"""Modules from hidden states to rewards or classes, in the order in which they are searched."""
WRAPPING = "base_model.model."
"""PEFT's prefix of every name."""
MERGED_PART = ".base_layer."
"""Part of the names of weights that adapters are merged into."""
SAVED_PART = ".modules_to_save.default."
"""Part of the names of modules that are trained in full, in addition to adapters."""
REPLACED_PART = ".original_module."
"""Part of the names of the originals of those modules."""


def is_adapter(name: str) -> bool:
    """Whether it is the name of an adapter's weight."""
    return "lora_" in name or ".lora." in f".{name}"


def strip_peft_parts(name: str) -> str:
    """The name without what PEFT adds to it."""
    while name.startswith(WRAPPING):
        name = name.removeprefix(WRAPPING)
    return name.replace(MERGED_PART, ".").replace(SAVED_PART, ".")
