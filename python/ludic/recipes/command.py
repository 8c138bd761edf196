"""`ludic train`: resolve, run, report; and what happens on Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.recipes.compose import compose, config_hash, to_yaml
from ludic.recipes.console import carry_out, play_out, quiet_libraries

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.run import Run
    from ludic.recipes.run_directory import RunDirectory
    from ludic.recipes.schema import Recipe


def train_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """The exit status: 0, or 128 and the signal's number after a stop. Errors of the user's are raised as `LudicError`."""
    started = time.perf_counter()
    if print_config:
        print(to_yaml(compose(arguments)), end="")
        return 0
    return carry_out(lambda console: _train(arguments, resume, console, started), json_only=json_only)


def _train(arguments: Sequence[str], resume: Path | None, console: Console, started: float) -> tuple[int, str]:
    """The exit status and the summary."""
    from ludic.errors import ConfigError
    from ludic.recipes.run_directory import RunDirectory

    if resume is not None and arguments:
        raise ConfigError(f"--resume goes on with the recipe of {resume}; it takes no other setting ({' '.join(arguments)})")
    console.print("Loading torch and transformers", highlight=False)
    directory = RunDirectory.go_on(resume) if resume is not None else None
    recipe = compose(arguments if directory is None else [str(directory.config)])
    run = _set_up(recipe, directory, console, started)
    with run.stop:
        code = play_out(run, command="train", started=started)
        return code, _conclude(run, console)


def _set_up(recipe: Recipe, directory: RunDirectory | None, console: Console, started: float) -> Run:
    """Everything is built before the folder is made, so that a wrong setting leaves nothing behind."""
    from ludic.recipes.run import Parts, Run
    from ludic.recipes.run_directory import RunDirectory
    from ludic.recipes.screen import Screen
    from ludic.recipes.watch import StopRequest

    quiet_libraries()
    screen = Screen(console, every=recipe.log_every)
    parts = Parts.build(recipe)
    directory = directory or RunDirectory.create(recipe)
    run = Run(recipe, parts, directory, screen, StopRequest(screen.note))
    size = sum(parameter.numel() for parameter in parts.model.parameters())
    screen.note(f"{recipe.recipe}: {size:,} parameters, seed {recipe.seed}, writing to {directory.path}/")
    run.watch.add("set_up", time.perf_counter() - started)
    return run


def _conclude(run: Run, console: Console) -> str:
    """Write summary and picture, show the report; the summary as JSON."""
    from ludic.recipes.report import draw_rewards, outcome_of, show_report

    outcome = outcome_of(run.progress, run.directory, run.parts.task, seed=run.recipe.seed, config_hash=config_hash(run.recipe))
    outcome.summary.write(run.directory)
    if outcome.rewards:
        draw_rewards(outcome, run.directory, f"{run.recipe.recipe}, {run.recipe.algorithm}, seed {run.recipe.seed}")
    show_report(console, outcome, run.directory)
    return outcome.summary.to_json()
