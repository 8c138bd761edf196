"""The schema of `ludic train-rm`: every setting of a file or the command line. Values come from
`defaults.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from omegaconf import MISSING

from ludic.recipes.epochs_schema import compose_epochs
from ludic.recipes.pairs_schema import PAIRS_LEAST, PairsRecipe
from ludic.recipes.rm.flags import parse_flags
from ludic.recipes.schema import make_trainer_section
from ludic.training.rm_config import RMTrainerConfig


@dataclass
class LossSection:
    """The Bradley-Terry loss."""

    beta: float = MISSING
    """P(chosen is preferred) = sigmoid(beta * margin)."""
    label_smoothing: float = MISSING
    """Label smoothing eps: every label y becomes y (1 - eps) + eps / 2."""
    regularization_lambda: float = MISSING
    """Weight of a penalty on the norm of the margins."""
    regularization_type: str = MISSING
    """Norm of that penalty: l2 or l1."""
    score_regularization_lambda: float = MISSING
    """Weight of a penalty on the scores."""
    score_regularization_type: str = MISSING
    """`squares`: of each score. `squared_sum`: of the sum of a pair's scores, as TRL's
    `center_rewards_coefficient`."""


@dataclass
class RMRecipe(PairsRecipe):
    """A run of `ludic train-rm`: a model with a scalar head, trained on preference pairs and
    measured on held-out pairs."""

    train_sample: int = MISSING
    """Training pairs at most on which `train_pairwise_accuracy` is measured."""
    loss: LossSection = field(default_factory=LossSection)


def compose_rm(arguments: Sequence[str] = ()) -> RMRecipe:
    """Resolve a recipe. `arguments` are at most one YAML file, any number of `key=value`, and
    the flags of `flags.py`."""
    return compose_epochs(
        RMRecipe,
        list(parse_flags(arguments)),
        package="ludic.recipes.rm",
        trainer=make_trainer_section(RMTrainerConfig),
        least={**PAIRS_LEAST, "train_sample": 1},
    )
