"""`ludic train`, `sft`, `dpo` and `train-rm`: the parts of which each command is made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.cli.console import quiet_libraries, run_with_console
from ludic.cli.shared_options import add_named_recipe
from ludic.cli.training_command import run_command
from ludic.errors import ConfigError
from ludic.recipes.compose import compose, config_hash
from ludic.runs.directory import DPODirectory, RMDirectory, RunDirectory, SFTDirectory

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.epochs_schema import DPORecipe, RMRecipe, SFTRecipe
    from ludic.recipes.schema import Recipe
    from ludic.runs.dpo import DPOParts, DPORun
    from ludic.runs.reinforce import RLRun
    from ludic.runs.reinforce_parts import RLParts
    from ludic.runs.reward_model import RMParts, RMRun
    from ludic.runs.screen import Screen
    from ludic.runs.sft import SFTParts, SFTRun
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
        from ludic.recipes.epochs_schema import compose_sft

        return compose_sft(arguments)

    def build(self, recipe: SFTRecipe, screen: Screen) -> SFTParts:
        from ludic.runs.sft import SFTParts

        return SFTParts.build(recipe)

    def folder_name(self, recipe: SFTRecipe) -> str:
        from ludic.recipes.epochs_schema import list_data_files

        data = recipe.task.kind.rpartition(":")[2] if recipe.data is None else list_data_files(recipe.data, "data")[0].stem
        return f"sft-{data}-seed{recipe.seed}"

    def run(self, recipe: SFTRecipe, parts: SFTParts, directory: SFTDirectory, screen: Screen, stop: StopRequest) -> SFTRun:
        from ludic.runs.sft import SFTRun

        return SFTRun(recipe, parts, directory, screen, stop)

    def conclude(self, run: SFTRun, console: Console) -> str:
        from ludic.runs.report.sft import conclude

        return conclude(run, console, config_hash=config_hash(run.recipe, schedule_steps=run.progress.schedule_steps))


def dpo_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """Returns the exit status, see `run_command`."""
    return run_command(DPOCommand(), arguments, resume=resume, json_only=json_only, print_config=print_config)


class DPOCommand:
    """`ludic dpo`, for `run_command`. `is_placed`: a launcher started this process."""

    directory = DPODirectory

    def __init__(self, *, is_placed: bool = False) -> None:
        self.is_placed = is_placed

    def compose(self, arguments: Sequence[str]) -> DPORecipe:
        from ludic.recipes.epochs_schema import compose_dpo

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


def train_rm_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """Returns the exit status, see `run_command`."""
    return run_command(TrainRMCommand(), arguments, resume=resume, json_only=json_only, print_config=print_config)


class TrainRMCommand:
    """`ludic train-rm`, for `run_command`. `is_placed`: a launcher started this process."""

    directory = RMDirectory

    def __init__(self, *, is_placed: bool = False) -> None:
        self.is_placed = is_placed

    def compose(self, arguments: Sequence[str]) -> RMRecipe:
        from ludic.recipes.epochs_schema import compose_rm

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
