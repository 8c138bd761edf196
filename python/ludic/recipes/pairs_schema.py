"""The settings that `ludic train-rm` and `ludic dpo` have in common: where the pairs come from, and
how the model is trained on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from ludic.recipes.epochs_schema import EpochsRecipe

PAIRS_LEAST = dict.fromkeys(("limit", "heldout_limit", "pairs"), 1)
"""The smallest values of the counts."""


@dataclass
class ColumnsSection:
    """The columns of the data, if they have other names."""

    prompt: Optional[str] = None  # noqa: UP045
    """What was asked; null: that of the row's format."""
    chosen: Optional[str] = None  # noqa: UP045
    """The better response; null: that of the row's format."""
    rejected: Optional[str] = None  # noqa: UP045
    """The other response; null: that of the row's format."""
    label: Optional[str] = None  # noqa: UP045
    """The probability that the chosen response is better; null: 1 for every pair."""


@dataclass
class PairsRecipe(EpochsRecipe):
    """A run over preference pairs, of data or of a built-in task."""

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
    chat_template: Any = MISSING
    """false: the tokenizer's chat template for conversations alone. true: for prompts and answers
    in plain text, too. A file with a Jinja template, or its text: as true, with that template,
    which is saved with the tokenizer."""
    system_prompt: Optional[str] = MISSING  # noqa: UP045
    """System prompt of every conversation."""
    pairs: int = MISSING
    """Pairs to generate if `data` is null."""
