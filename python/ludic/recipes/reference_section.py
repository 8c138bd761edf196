"""The settings of the reference, a policy that does not change while the model is reinforced, and
of InfoSeed: answers whose prompt names a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Optional

from ludic.errors import ConfigError
from ludic.training.info_seed.settings import InfoSeed

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


@dataclass
class InfoSeedSection:
    """Answers whose prompt names a seed, and a loss by which the seed can be told from the answer.
    For tasks of one turn."""

    num_seeds: int = 0
    """Seeded answers to each problem, besides `rollout.group_size` plain ones; 0: no InfoSeed."""
    coeff: float = 0.01
    """Factor of the loss."""
    temperature: float = 0.1
    """Of the cosines."""
    loss: str = "infonce"
    """`infonce`: pairs of answers with one seed. `ce`: classes, with fixed directions."""
    pooling: str = "mean"
    """What represents an answer: the `mean` of its hidden states, or the `last` of them."""
    template: str = "\n[seed={seed}]"
    """Appended to the prompt; with `{prompt}` in place of it."""
    eval_samples: int = 1
    """Answers to each held-out problem and seed, for the metrics `eval_seed/*`; 0: none."""


def build_info_seed(section: InfoSeedSection) -> InfoSeed | None:
    """The settings; None without seeds. Raises `ConfigError` for settings that have no effect."""
    values = {field.name: getattr(section, field.name) for field in fields(section)}
    if section.num_seeds == 0:
        idle = [name for name, value in values.items() if value != getattr(InfoSeedSection(), name)]
        if idle:
            raise ConfigError(
                f"{', '.join(f'info_seed.{name}' for name in idle)} need info_seed.num_seeds above 0; set it, or leave them out"
            )
        return None
    if section.eval_samples < 0:
        raise ConfigError(f"info_seed.eval_samples ({section.eval_samples}) must be >= 0; 0 measures nothing")
    del values["eval_samples"]
    return InfoSeed(**values)
