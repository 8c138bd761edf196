"""The settings of InfoSeed, and the tag that names a seed in a prompt."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Literal

from ludic.errors import ConfigError


@dataclass(frozen=True)
class InfoSeed:
    """Completions whose prompt names a seed, and a loss by which the seed can be told from the
    completion alone: the policy learns as many ways to answer as there are seeds.

    Example: `InfoSeed(4)` tags the prompt `2+2=` of seed 3 as `2+2=\\n[seed=3]`.
    """

    num_seeds: int
    """Seeded completions of each prompt, with the seeds 1..num_seeds."""
    coeff: float = 0.01
    """Factor of the loss."""
    temperature: float = 0.1
    """Of the cosines, in both losses."""
    loss: Literal["infonce", "ce"] = "infonce"
    """`infonce`: `SeedContrastiveLoss`; `ce`: `SeedClassificationLoss`, with a fixed head
    (`FixedSeedHead`)."""
    pooling: Literal["mean", "last"] = "mean"
    """What represents a completion: the mean of its tokens' hidden states, or the last of them."""
    template: str = "\n[seed={seed}]"
    """Appended to the prompt. With `{prompt}` it replaces the prompt."""

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise ConfigError(f"num_seeds ({self.num_seeds}) must be >= 1; leave InfoSeed out for none")
        if not self.coeff >= 0 or not self.temperature > 0:
            raise ConfigError(f"coeff ({self.coeff}) must be >= 0 and temperature ({self.temperature}) > 0")
        if self.loss not in ("infonce", "ce"):
            raise ConfigError(f"loss ({self.loss!r}) must be 'infonce' or 'ce'")
        if self.pooling not in ("mean", "last"):
            raise ConfigError(f"pooling ({self.pooling!r}) must be 'mean' or 'last'")
        check_template(self.template)

    def tag(self, prompt: str, seed_id: int) -> str:
        """The prompt with its seed."""
        return tag_prompt(prompt, seed_id, self.template)


def tag_prompt(prompt: str, seed_id: int, template: str) -> str:
    """`template` after the prompt; in place of it if it contains `{prompt}`."""
    tag = template.format(prompt=prompt, seed=seed_id)
    return tag if "{prompt}" in template else prompt + tag


def check_template(template: str) -> None:
    """Raise ConfigError for a template without `{seed}`, or with other fields than `{seed}` and
    `{prompt}`."""
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ConfigError(f"template ({template!r}) is not a format string: {error}; write a brace as two") from error
    if "seed" not in fields or fields - {"seed", "prompt"}:
        raise ConfigError(f"template ({template!r}) must contain {{seed}}, and no other field but {{prompt}}")
