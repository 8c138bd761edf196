"""`ludic train-rm`: a reward model from preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.cli.training_command import run_command
from ludic.recipes.compose import config_hash
from ludic.runs.directory import RMDirectory

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.rm.schema import RMRecipe
    from ludic.runs.reward_model import RMParts, RMRun
    from ludic.runs.screen import Screen
    from ludic.runs.stop_request import StopRequest


def train_rm_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """Returns the exit status, see `run_command`."""
    return run_command(TrainRMCommand(), arguments, resume=resume, json_only=json_only, print_config=print_config)


class TrainRMCommand:
    """`ludic train-rm`, for `run_command`. `is_placed`: a launcher started this process."""

    directory = RMDirectory

    def __init__(self, *, is_placed: bool = False) -> None:
        self.is_placed = is_placed

    def compose(self, arguments: Sequence[str]) -> RMRecipe:
        from ludic.recipes.rm.schema import compose_rm

        return compose_rm(arguments)

    def build(self, recipe: RMRecipe, screen: Screen) -> RMParts:
        from ludic.runs.reward_model import RMParts

        return RMParts.build(recipe, note=screen.note)

    def folder_name(self, recipe: RMRecipe) -> str:
        data = recipe.task.kind.rpartition(":")[2] if recipe.data is None else Path(recipe.data).stem
        return f"rm-{data}-seed{recipe.seed}"

    def run(self, recipe: RMRecipe, parts: RMParts, directory: RMDirectory, screen: Screen, stop: StopRequest) -> RMRun:
        from ludic.runs.reward_model import RMRun

        return RMRun(recipe, parts, directory, screen, stop)

    def conclude(self, run: RMRun, console: Console) -> str:
        from ludic.runs.report.reward_model import conclude

        return conclude(run, console, config_hash=config_hash(run.recipe, schedule_steps=run.progress.schedule_steps))
