"""`ludic dpo`: a policy from preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.cli.training_command import run_command
from ludic.recipes.compose import config_hash
from ludic.runs.directory import DPODirectory

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.dpo.schema import DPORecipe
    from ludic.runs.dpo import DPOParts, DPORun
    from ludic.runs.screen import Screen
    from ludic.runs.stop_request import StopRequest


def dpo_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """Returns the exit status, see `run_command`."""
    return run_command(DPOCommand(), arguments, resume=resume, json_only=json_only, print_config=print_config)


class DPOCommand:
    """`ludic dpo`, for `run_command`. `is_placed`: a launcher started this process."""

    directory = DPODirectory

    def __init__(self, *, is_placed: bool = False) -> None:
        self.is_placed = is_placed

    def compose(self, arguments: Sequence[str]) -> DPORecipe:
        from ludic.recipes.dpo.schema import compose_dpo

        return compose_dpo(arguments)

    def build(self, recipe: DPORecipe, screen: Screen) -> DPOParts:
        from ludic.runs.dpo import DPOParts

        return DPOParts.build(recipe, note=screen.note)

    def folder_name(self, recipe: DPORecipe) -> str:
        data = recipe.task.kind.rpartition(":")[2] if recipe.data is None else Path(recipe.data).stem
        return f"dpo-{data}-seed{recipe.seed}"

    def run(self, recipe: DPORecipe, parts: DPOParts, directory: DPODirectory, screen: Screen, stop: StopRequest) -> DPORun:
        from ludic.runs.dpo import DPORun

        return DPORun(recipe, parts, directory, screen, stop)

    def conclude(self, run: DPORun, console: Console) -> str:
        from ludic.runs.report.dpo import conclude

        return conclude(run, console, config_hash=config_hash(run.recipe, schedule_steps=run.progress.schedule_steps))
