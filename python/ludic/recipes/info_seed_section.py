"""The settings of InfoSeed: answers whose prompt names a seed."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ludic.errors import ConfigError
from ludic.training.info_seed.settings import InfoSeed


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
