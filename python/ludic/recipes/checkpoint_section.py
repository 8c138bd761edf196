"""The settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from omegaconf import MISSING

from ludic.errors import ConfigError
from ludic.files.checkpoints import check_layout


@dataclass
class CheckpointSection:
    """Checkpoints, from which an interrupted run is resumed in either phase."""

    every_n_steps: int = MISSING
    """0: only at the end, and when the run is stopped."""
    max_to_keep: Optional[int] = MISSING  # noqa: UP045
    """The newest so many of a phase are kept, at least 1; those of `callbacks.keep_best` do not
    count. Null: all."""
    layout: str = "full"
    """`full`: each checkpoint is a model with its tokenizer, which transformers and vLLM open.
    `shallow`: for resuming alone. Of a sharded model each rank writes the parts that it has, and no
    tokenizer is written. The folder `model` of the run is always full."""
    static_files: Optional[str] = None  # noqa: UP045
    """Folder of a model, whose config, generation config and tokenizer are added to each checkpoint
    that lacks them; null: none."""


def check_checkpoints(section: CheckpointSection) -> None:
    """Raise `ConfigError` for a layout that does not exist, and for files that are not there."""
    check_layout(section.layout)
    if section.static_files is not None and not Path(section.static_files).is_dir():
        raise ConfigError(f"checkpoint.static_files ({section.static_files}) is no folder; name the folder of a model")
