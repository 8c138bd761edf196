"""Options that commands share, and what they do with them before their settings are composed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE.yaml] [KEY=VALUE]...", help="A settings file, and fields to set.")
]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of the run to resume.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate; short for trainer.lr=RATE.")]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print only summary.json on standard output.")]
PrintConfig = Annotated[bool, typer.Option(help="Print the resolved settings as YAML and stop.")]


def add_named_recipe(arguments: Sequence[str], resume: Path | None) -> Sequence[str]:
    """The arguments, before them the file that `GRPO_RECIPE` names if they name no recipe."""
    from ludic.recipes.compose import split_arguments

    named = os.environ.get("GRPO_RECIPE")
    return [named, *arguments] if named and resume is None and split_arguments(arguments)[0] is None else arguments


def make_lr_setting(lr: float | None) -> list[str]:
    """The setting that `--lr` is short for."""
    return [] if lr is None else [f"trainer.lr={lr}"]


def refuse_flags_in(arguments: list[str] | None) -> None:
    """Raise ConfigError for a flag among the settings, which names the setting."""
    if any(argument.startswith("-") for argument in arguments or ()):
        from ludic.recipes.compose import list_settings
        from ludic.recipes.overrides import refuse_flags

        refuse_flags(arguments or (), list_settings())
