"""What models call the weights that score, and what PEFT puts into the names of what it adapts."""

from __future__ import annotations

HEAD_NAMES = ("score", "classifier", "classification_head", "lm_head", "reward_head", "v_head")
"""Modules that make rewards or classes of hidden states, in the order in which they are looked
for."""
WRAPPING = "base_model.model."
"""What PEFT puts before every name."""
MERGED_PART = ".base_layer."
"""In the names of what adapters are merged into."""
SAVED_PART = ".modules_to_save.default."
"""In the names of modules that are trained whole, beside adapters."""
REPLACED_PART = ".original_module."
"""In the names of those modules as they were."""


def is_adapter(name: str) -> bool:
    """Whether it is a weight of an adapter."""
    return "lora_" in name or ".lora." in f".{name}"


def unwrapped_name(name: str) -> str:
    """The name without what PEFT puts around it."""
    while name.startswith(WRAPPING):
        name = name.removeprefix(WRAPPING)
    return name.replace(MERGED_PART, ".").replace(SAVED_PART, ".")
