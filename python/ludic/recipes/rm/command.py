"""`ludic train-rm`: a reward model from preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.recipes.compose import config_hash
from ludic.recipes.run_directory import RMDirectory
from ludic.recipes.training_command import run_command

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.rm.run import RMRun
    from ludic.recipes.rm.schema import RMRecipe
    from ludic.recipes.screen import Screen
    from ludic.recipes.watch import StopRequest


def train_rm_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """The exit status, as `run_command` has it."""
    return run_command(_TrainRM(), arguments, resume=resume, json_only=json_only, print_config=print_config)


class _TrainRM:
    directory = RMDirectory

    def compose(self, arguments: Sequence[str]) -> RMRecipe:
        from ludic.recipes.rm.schema import compose_rm

        return compose_rm(arguments)

    def set_up(self, recipe: RMRecipe, directory: RMDirectory | None, screen: Screen, stop: StopRequest) -> RMRun:
        from ludic.recipes.rm.run import RMParts, RMRun

        parts = RMParts.build(recipe, note=screen.note)
        data = recipe.task.kind.rpartition(":")[2] if recipe.data is None else Path(recipe.data).stem
        return RMRun(recipe, parts, directory or RMDirectory.begin(recipe, f"rm-{data}-seed{recipe.seed}"), screen, stop)

    def conclude(self, run: RMRun, console: Console) -> str:
        from ludic.recipes.rm.report import conclude

        return conclude(run, console, config_hash=config_hash(run.recipe))
