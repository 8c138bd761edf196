"""The tree of a supervised run: every field that a file or the command line can set. Values are
those of `defaults.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING

from ludic.errors import ConfigError
from ludic.recipes.epochs_schema import EpochsRecipe, compose_epochs
from ludic.recipes.schema import trainer_section
from ludic.training.samples.conversations import ASSISTANT_TURNS


@dataclass
class SFTRecipe(EpochsRecipe):
    """One run: rows of a file become samples, a model is trained on them, its held-out loss is
    measured before and after."""

    data: Any = MISSING
    """JSONL file, or a list of them; null: `rows` demonstrations of `task`, written to the run's
    folder."""
    heldout_data: Any = MISSING
    """JSONL file, or a list of them, to measure on instead."""
    assistant_turns: str = MISSING
    """Of conversations, which messages of the assistant are trained: all, last, or each in a
    sample of its own."""
    chat_template: Optional[str] = MISSING  # noqa: UP045  OmegaConf reads this annotation at run time
    """File with a Jinja template that replaces the tokenizer's and is saved with it; null: the
    tokenizer's own."""
    rows: int = MISSING
    """Demonstrations to write where there is no `data`."""


def compose_sft(arguments: Sequence[str] = ()) -> SFTRecipe:
    """`arguments`: at most one YAML file, and any number of `key=value`, as for `ludic train`."""
    recipe = compose_epochs(SFTRecipe, arguments, package="ludic.recipes.sft", trainer=trainer_section(), least={"rows": 2})
    if recipe.assistant_turns not in ASSISTANT_TURNS:
        raise ConfigError(f"assistant_turns ({recipe.assistant_turns}) must be one of {', '.join(ASSISTANT_TURNS)}")
    return recipe


def paths_of(setting: Any, name: str) -> list[Path]:
    """The files of `data` or `heldout_data`."""
    given = [setting] if isinstance(setting, str) else setting
    if not isinstance(given, list) or not given or not all(isinstance(path, str) for path in given):
        raise ConfigError(f"{name} ({setting}) must be the path of a file, or a list of paths: {name}=[a.jsonl,b.parquet]")
    return [Path(path).expanduser() for path in given]
