"""The settings of the reference, a policy that does not change while the model is reinforced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ludic.errors import ConfigError

SOURCES = ("auto", "model", "adapters_off")


@dataclass
class ReferenceSection:
    """What an algorithm with `beta` or `reference_kl` above 0 is held to. Others read none."""

    source: str = "auto"
    """`model`: a frozen copy, in memory beside the policy. `adapters_off`: the policy with its
    adapters switched off (`lora.rank`). `auto`: adapters off if the policy has some and
    `reference.model` is null, else a frozen copy."""
    model: Optional[str] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """Folder in Hugging Face layout, or hub id, with the policy's tokenizer; null: the policy as it
    is when reinforcement begins, which the run keeps in its folder `reference`."""


def check_reference(section: ReferenceSection, *, has_adapters: bool) -> None:
    """Raise `ConfigError` for a source that does not exist or that this run does not have."""
    if section.source == "attached":
        raise ConfigError(
            "reference.source (attached) needs samples that bring their reference log-probabilities, and those of a recipe are new "
            "answers of the policy; set reference.source=model, or in Python SampleAttachments.reference_logps on each sample and "
            "Trainer(reference=AttachedReference())"
        )
    if section.source not in SOURCES:
        raise ConfigError(f"reference.source ({section.source}) must be one of {', '.join(SOURCES)}")
    if section.source == "adapters_off" and not has_adapters:
        raise ConfigError("reference.source=adapters_off needs adapters to switch off; set lora.rank, or reference.source=model")
    if section.source == "adapters_off" and section.model is not None:
        raise ConfigError(
            f"reference.model ({section.model}) is for reference.source=model, which is adapters_off; drop one of them"
        )


def switches_adapters_off(section: ReferenceSection, *, has_adapters: bool) -> bool:
    """Whether the reference is the policy without its adapters."""
    return section.source == "adapters_off" or (section.source == "auto" and has_adapters and section.model is None)
