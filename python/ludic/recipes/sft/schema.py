"""The schema of `ludic sft`: every setting of a file or the command line. Values come from
`defaults.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from ludic.data.sft_formats import check_format_name
from ludic.errors import ConfigError
from ludic.recipes.epochs_schema import EpochsRecipe, compose_epochs
from ludic.recipes.schema import make_trainer_section
from ludic.training.samples.conversations import ASSISTANT_TURNS


@dataclass
class SFTRecipe(EpochsRecipe):
    """A run of `ludic sft`: rows of a file become samples, a model is trained on them, and its
    held-out loss is measured before and after."""

    data: Any = MISSING
    """JSONL file, or a list of them; null: `rows` demonstrations of `task`, which are written to
    the run's folder."""
    heldout_data: Any = MISSING
    """JSONL file, or a list of them, to measure on instead of a share of `data`."""
    data_format: str = MISSING
    """Format of the rows: messages, prompt_completion, alpaca, sharegpt, text, rollout, tokens, or
    auto, by the columns of each file."""
    streaming: bool = False
    """Read `data` while training instead of all before it: JSONL and parquet files, folders of
    such, and ids of the hub, of any size."""
    shuffle_buffer: int = 10_000
    """Rows that are in memory with `streaming`: each such block is shuffled by itself. The share
    `heldout` is taken from the first block."""
    assistant_turns: str = MISSING
    """The messages of the assistant that are trained in a conversation: all, last, or each in a
    sample of its own."""
    rows: int = MISSING
    """Demonstrations to generate if `data` is null."""


def compose_sft(arguments: Sequence[str] = ()) -> SFTRecipe:
    """`arguments`: at most one YAML file, and any number of `key=value`, as for `ludic train`."""
    recipe = compose_epochs(
        SFTRecipe, arguments, package="ludic.recipes.sft", trainer=make_trainer_section(), least={"rows": 2, "shuffle_buffer": 1}
    )
    if recipe.assistant_turns not in ASSISTANT_TURNS:
        raise ConfigError(f"assistant_turns ({recipe.assistant_turns}) must be one of {', '.join(ASSISTANT_TURNS)}")
    check_format_name(recipe.data_format)
    return recipe


def list_data_files(setting: Any, name: str) -> list[Path]:
    """The files that `data` or `heldout_data` names."""
    paths = [setting] if isinstance(setting, str) else setting
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"{name} ({setting}) must be the path of a file, or a list of paths: {name}=[a.jsonl,b.parquet]")
    return [Path(path).expanduser() for path in paths]
