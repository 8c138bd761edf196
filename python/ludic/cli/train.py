"""`ludic train`: reinforcement learning with a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.cli.shared_options import add_named_recipe
from ludic.cli.training_command import run_command
from ludic.recipes.compose import compose, config_hash
from ludic.runs.directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.schema import Recipe
    from ludic.runs.reinforce import RLRun
    from ludic.runs.reinforce_parts import RLParts
    from ludic.runs.screen import Screen
    from ludic.runs.stop_request import StopRequest


def train_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """Returns the exit status, see `run_command`."""
    return run_command(
        TrainCommand(), add_named_recipe(arguments, resume), resume=resume, json_only=json_only, print_config=print_config
    )


class TrainCommand:
    """`ludic train`, for `run_command`. `is_placed`: a launcher started this process."""

    directory = RunDirectory

    def __init__(self, *, is_placed: bool = False) -> None:
        self.is_placed = is_placed

    def compose(self, arguments: Sequence[str]) -> Recipe:
        return compose(arguments)

    def build(self, recipe: Recipe, screen: Screen) -> RLParts:
        from ludic.runs.reinforce_parts import RLParts

        return RLParts.build(recipe)

    def folder_name(self, recipe: Recipe) -> str:
        return f"{recipe.recipe}-{recipe.algorithm.rpartition(':')[2]}-seed{recipe.seed}"

    def run(self, recipe: Recipe, parts: RLParts, directory: RunDirectory, screen: Screen, stop: StopRequest) -> RLRun:
        from ludic.runs.reinforce import RLRun

        return RLRun(recipe, parts, directory, screen, stop, is_placed=self.is_placed)

    def conclude(self, run: RLRun, console: Console) -> str:
        from ludic.runs.report.reinforce import build_outcome, draw_rewards, show_report

        outcome = build_outcome(
            run.progress,
            run.directory,
            run.parts.task,
            run.recipe,
            config_hash=config_hash(run.recipe, schedule_steps=run.progress.schedule_steps),
        )
        outcome.summary.write(run.directory)
        if outcome.rewards:
            draw_rewards(outcome, run.directory, f"{run.recipe.recipe}, {run.recipe.algorithm}, seed {run.recipe.seed}")
        show_report(console, outcome, run.directory)
        return outcome.summary.to_json()
