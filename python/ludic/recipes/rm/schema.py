"""The tree of a reward-model run: every field that a file or the command line can set. Values
are those of `defaults.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from omegaconf import MISSING

from ludic.recipes.epochs_schema import EpochsRecipe, compose_epochs
from ludic.recipes.rm.flags import overrides_of_flags
from ludic.recipes.schema import trainer_section
from ludic.training.rm_trainer import RMTrainerConfig


@dataclass
class LossSection:
    """The Bradley-Terry loss."""

    beta: float = MISSING
    """P(chosen preferred) = sigmoid(beta * margin)."""
    label_smoothing: float = MISSING
    """Every label y becomes y (1 - eps) + eps / 2."""
    regularization_lambda: float = MISSING
    """Weight of the norm of the margins."""
    regularization_type: str = MISSING
    """l2 or l1."""
    score_regularization_lambda: float = MISSING
    """Weight of the mean square of the scores."""


@dataclass
class ColumnsSection:
    """Which column of the data has what, where it has another name."""

    prompt: Optional[str] = None  # noqa: UP045
    chosen: Optional[str] = None  # noqa: UP045
    rejected: Optional[str] = None  # noqa: UP045
    label: Optional[str] = None  # noqa: UP045
    """The probability that the chosen response is the better; null: 1 for every pair."""


@dataclass
class RMRecipe(EpochsRecipe):
    """One run: preference pairs, a model with a scalar head trained on them, and its metrics on
    pairs that are held out."""

    data: Optional[str] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """JSONL, JSON, CSV or parquet file, folder, or hub id; null: `pairs` pairs drawn by `task`:
    `digits`, or a class of your own as `package.module:Class`."""
    data_config: Optional[str] = MISSING  # noqa: UP045
    """Of a hub id: the name of its configuration."""
    split: str = MISSING
    """Of a hub id or folder: what is trained on."""
    limit: Optional[int] = MISSING  # noqa: UP045
    """Rows that are read at most, drawn at random by `seed`; null: all."""
    heldout_data: Optional[str] = MISSING  # noqa: UP045
    """File, folder or hub id to measure on instead of a share of the data."""
    heldout_split: Optional[str] = MISSING  # noqa: UP045
    """Split of `heldout_data`, or of `data`, to measure on instead. Files have none."""
    heldout_limit: Optional[int] = MISSING  # noqa: UP045
    """Held-out rows at most, drawn the same in every run; null: all."""
    columns: ColumnsSection = field(default_factory=ColumnsSection)
    chat_template: bool = MISSING
    """Prompts and answers that are plain text go through the tokenizer's chat template as well;
    conversations always do."""
    system_prompt: Optional[str] = MISSING  # noqa: UP045
    """Put before every conversation."""
    train_sample: int = MISSING
    """Training pairs on which `train_pairwise_accuracy` is measured, at most."""
    pairs: int = MISSING
    """Pairs to draw where there is no `data`."""
    loss: LossSection = field(default_factory=LossSection)
    gradient_checkpointing: bool = MISSING
    """Activations are computed again in the backward pass: less memory, more time."""


def compose_rm(arguments: Sequence[str] = ()) -> RMRecipe:
    """`arguments`: at most one YAML file, any number of `key=value`, as for `ludic train`, and
    the flags of `flags.py`."""
    return compose_epochs(
        RMRecipe,
        list(overrides_of_flags(arguments)),
        package="ludic.recipes.rm",
        trainer=trainer_section(RMTrainerConfig),
        least=dict.fromkeys(("limit", "heldout_limit", "train_sample", "pairs"), 1),
    )
