"""`ludic sft`: supervised fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.cli.console import quiet_libraries, run_with_console
from ludic.cli.training_command import run_command
from ludic.errors import ConfigError
from ludic.recipes.compose import config_hash
from ludic.runs.directory import SFTDirectory

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.sft.schema import SFTRecipe
    from ludic.runs.screen import Screen
    from ludic.runs.sft import SFTParts, SFTRun
    from ludic.runs.stop_request import StopRequest


def sft_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """Returns the exit status, see `run_command`."""
    return run_command(SFTCommand(), arguments, resume=resume, json_only=json_only, print_config=print_config)


def preview_command(arguments: Sequence[str], *, rows: int, json_only: bool) -> int:
    """Show what would be trained on. Loads the tokenizer and no model, and writes nothing."""
    if rows < 1:
        raise ConfigError(f"--preview ({rows}) must be at least 1 row")
    recipe = SFTCommand().compose(arguments)

    def work(console: Console) -> tuple[int, str]:
        from ludic.recipes.model import build_tokenizer
        from ludic.runs.data.preview import preview

        quiet_libraries()
        shown = preview(recipe, build_tokenizer(recipe), rows)
        shown.show(console)
        return 0, json.dumps(shown.to_dict(), indent=2, ensure_ascii=False) + "\n"

    return run_with_console(work, json_only=json_only)


class SFTCommand:
    """`ludic sft`, for `run_command`. `is_placed`: a launcher started this process."""

    directory = SFTDirectory

    def __init__(self, *, is_placed: bool = False) -> None:
        self.is_placed = is_placed

    def compose(self, arguments: Sequence[str]) -> SFTRecipe:
        from ludic.recipes.sft.schema import compose_sft

        return compose_sft(arguments)

    def build(self, recipe: SFTRecipe, screen: Screen) -> SFTParts:
        from ludic.runs.sft import SFTParts

        return SFTParts.build(recipe)

    def folder_name(self, recipe: SFTRecipe) -> str:
        from ludic.recipes.sft.schema import list_data_files

        data = recipe.task.kind.rpartition(":")[2] if recipe.data is None else list_data_files(recipe.data, "data")[0].stem
        return f"sft-{data}-seed{recipe.seed}"

    def run(self, recipe: SFTRecipe, parts: SFTParts, directory: SFTDirectory, screen: Screen, stop: StopRequest) -> SFTRun:
        from ludic.runs.sft import SFTRun

        return SFTRun(recipe, parts, directory, screen, stop)

    def conclude(self, run: SFTRun, console: Console) -> str:
        from ludic.runs.report.sft import conclude

        return conclude(run, console, config_hash=config_hash(run.recipe, schedule_steps=run.progress.schedule_steps))
