"""The schema of `ludic dpo`: every setting of a file or the command line. Values come from
`defaults.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from omegaconf import MISSING

from ludic.errors import ConfigError
from ludic.recipes.epochs_schema import compose_epochs
from ludic.recipes.pairs_schema import PAIRS_LEAST, PairsRecipe
from ludic.recipes.schema import make_trainer_section
from ludic.training.dpo_config import DPOTrainerConfig

WARMUP_ON = ("chosen", "both")


@dataclass
class DPOLossSection:
    """The loss of the pairs, `DPOLoss`."""

    loss_type: str = MISSING
    """sigmoid (DPO), ipo, or robust."""
    beta: float = MISSING
    """How much the policy is held to the reference: less moves it further. For ipo it is tau."""
    label_smoothing: float = MISSING
    """The probability that a label is wrong, in [0, 0.5)."""
    length_normalize: Optional[bool] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """Divide the log-ratios by the number of answer tokens; null: for ipo alone, as in TRL."""
    nll_coeff: float = MISSING
    """Weight of the negative log-likelihood of the chosen answers, per token; 0: without it."""


@dataclass
class DPOWarmupSection:
    """Supervised fine-tuning on the answers of the pairs, before the reference is fixed: for a
    model that does not answer such prompts yet."""

    steps: int = MISSING
    """0: no warm-up."""
    batch_size: int = MISSING
    """Answers per step."""
    lr: float = MISSING
    """Its learning rate; the other settings are those of `trainer`."""
    answers: str = MISSING
    """What is learnt: the `chosen` answers, as in the DPO paper, or `both` of each pair."""


@dataclass
class DPOReferenceSection:
    """What the policy is held to. It scores all pairs once, before the first step."""

    model: Optional[str] = None  # noqa: UP045
    """Folder in Hugging Face layout, or hub id, with the policy's tokenizer; null: the policy as it
    is after the warm-up, with its adapters off."""


@dataclass
class DPORecipe(PairsRecipe):
    """A run of `ludic dpo`: a policy, preference pairs and a reference. Held-out pairs are measured
    after it, sampled answers before and after."""

    reference: DPOReferenceSection = field(default_factory=DPOReferenceSection)
    warmup: DPOWarmupSection = field(default_factory=DPOWarmupSection)
    loss: DPOLossSection = field(default_factory=DPOLossSection)
    answers: int = MISSING
    """Answers that are sampled before and after, to held-out prompts at temperature 1; 0: none."""
    max_new_tokens: int = MISSING
    """Token limit of such an answer."""


def compose_dpo(arguments: Sequence[str] = ()) -> DPORecipe:
    """Resolve a recipe. `arguments` are at most one YAML file and any number of `key=value`."""
    recipe = compose_epochs(
        DPORecipe,
        arguments,
        package="ludic.recipes.dpo",
        trainer=make_trainer_section(DPOTrainerConfig),
        least={**PAIRS_LEAST, "warmup.steps": 0, "warmup.batch_size": 1, "answers": 0, "max_new_tokens": 1},
    )
    if recipe.warmup.answers not in WARMUP_ON:
        raise ConfigError(f"warmup.answers ({recipe.warmup.answers}) must be one of {', '.join(WARMUP_ON)}")
    return recipe
