"""`ludic train-rm`: resolve, run, report; and what happens on Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.errors import ConfigError
from ludic.recipes.compose import config_hash, to_yaml
from ludic.recipes.console import carry_out, play_out, quiet_libraries

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.rm.run import RMRun


def train_rm_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """The exit status: 0, or 128 and the signal's number after a stop. Errors of the user's are raised as `LudicError`."""
    started = time.perf_counter()
    if print_config:
        from ludic.recipes.rm.schema import compose_rm

        print(to_yaml(compose_rm(arguments)), end="")
        return 0
    return carry_out(lambda console: _train(arguments, resume, console, started), json_only=json_only)


def _train(arguments: Sequence[str], resume: Path | None, console: Console, started: float) -> tuple[int, str]:
    """The exit status and the summary."""
    if resume is not None and arguments:
        raise ConfigError(f"--resume goes on with the settings of {resume}; it takes no other ({' '.join(arguments)})")
    console.print("Loading torch and transformers", highlight=False)
    run = _set_up(arguments, resume, console, started)
    with run.stop:
        code = play_out(run, command="train-rm", started=started)
        from ludic.recipes.rm.report import conclude

        return code, conclude(run, console, config_hash=config_hash(run.recipe))


def _set_up(arguments: Sequence[str], resume: Path | None, console: Console, started: float) -> RMRun:
    """Everything is built, and every pair read, before the folder is made."""
    from ludic.recipes.rm.run import RMDirectory, RMParts, RMRun
    from ludic.recipes.rm.schema import compose_rm
    from ludic.recipes.screen import Screen
    from ludic.recipes.watch import StopRequest

    quiet_libraries()
    directory = RMDirectory.go_on(resume) if resume is not None else None
    recipe = compose_rm(arguments if directory is None else [str(directory.config)])
    screen = Screen(console, every=recipe.log_every)
    parts = RMParts.build(recipe, note=screen.note)
    run = RMRun(recipe, parts, directory or RMDirectory.begin(recipe), screen, StopRequest(screen.note))
    sizes = [parameter.numel() for parameter in parts.model.parameters()]
    trained = sum(parameter.numel() for parameter in parts.model.parameters() if parameter.requires_grad)
    of_which = f", {trained:,} of them trained" if trained < sum(sizes) else ""
    screen.note(f"train-rm: {sum(sizes):,} parameters{of_which}, seed {recipe.seed}, writing to {run.directory.path}/")
    run.watch.add("set_up", time.perf_counter() - started)
    return run
