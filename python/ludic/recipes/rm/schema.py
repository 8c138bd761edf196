"""The schema of `ludic train-rm`: every setting of a file or the command line. Values come from
`defaults.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from omegaconf import MISSING

from ludic.recipes.epochs_schema import EpochsRecipe, compose_epochs
from ludic.recipes.rm.flags import parse_flags
from ludic.recipes.schema import make_trainer_section
from ludic.training.rm_trainer import RMTrainerConfig


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
    """Weight of a penalty on the mean square of the scores."""


@dataclass
class ColumnsSection:
    """The columns of the data, if they have other names."""

    prompt: Optional[str] = None  # noqa: UP045
    chosen: Optional[str] = None  # noqa: UP045
    rejected: Optional[str] = None  # noqa: UP045
    label: Optional[str] = None  # noqa: UP045
    """The probability that the chosen response is better; null: 1 for every pair."""


@dataclass
class RMRecipe(EpochsRecipe):
    """A run of `ludic train-rm`: a model with a scalar head, trained on preference pairs and
    measured on held-out pairs."""

    data: Optional[str] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """JSONL, JSON, CSV or parquet file, folder, or hub id; null: `pairs` pairs drawn by `task`:
    `digits`, or a class of your own as `package.module:Class`."""
    data_config: Optional[str] = MISSING  # noqa: UP045
    """The configuration of a hub id."""
    split: str = MISSING
    """The split of a hub id or folder to train on."""
    limit: Optional[int] = MISSING  # noqa: UP045
    """Rows to read at most, drawn at random by `seed`; null: all."""
    heldout_data: Optional[str] = MISSING  # noqa: UP045
    """File, folder or hub id to measure on instead of a share of the data."""
    heldout_split: Optional[str] = MISSING  # noqa: UP045
    """Split of `heldout_data`, or of `data`, to measure on. Files have no splits."""
    heldout_limit: Optional[int] = MISSING  # noqa: UP045
    """Held-out rows at most, the same in every run; null: all."""
    columns: ColumnsSection = field(default_factory=ColumnsSection)
    chat_template: bool = MISSING
    """Apply the tokenizer's chat template to prompts and answers in plain text, too;
    conversations always have it."""
    system_prompt: Optional[str] = MISSING  # noqa: UP045
    """System prompt of every conversation."""
    train_sample: int = MISSING
    """Training pairs at most on which `train_pairwise_accuracy` is measured."""
    pairs: int = MISSING
    """Pairs to generate if `data` is null."""
    loss: LossSection = field(default_factory=LossSection)
    gradient_checkpointing: bool = MISSING
    """Recompute activations in the backward pass: less memory, more time."""


def compose_rm(arguments: Sequence[str] = ()) -> RMRecipe:
    """Resolve a recipe. `arguments` are at most one YAML file, any number of `key=value`, and
    the flags of `flags.py`."""
    return compose_epochs(
        RMRecipe,
        list(parse_flags(arguments)),
        package="ludic.recipes.rm",
        trainer=make_trainer_section(RMTrainerConfig),
        least=dict.fromkeys(("limit", "heldout_limit", "train_sample", "pairs"), 1),
    )
