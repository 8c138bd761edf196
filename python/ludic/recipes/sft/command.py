"""`ludic sft`: resolve, run, report; and what happens on Ctrl-C."""

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

    from ludic.recipes.sft.run import SFTRun


def sft_command(arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool) -> int:
    """The exit status: 0, or 128 and the signal's number after a stop. Errors of the user's are raised as `LudicError`."""
    started = time.perf_counter()
    if print_config:
        from ludic.recipes.sft.schema import compose_sft

        print(to_yaml(compose_sft(arguments)), end="")
        return 0
    return carry_out(lambda console: _train(arguments, resume, console, started), json_only=json_only)


def _train(arguments: Sequence[str], resume: Path | None, console: Console, started: float) -> tuple[int, str]:
    """The exit status and the summary."""
    if resume is not None and arguments:
        raise ConfigError(f"--resume goes on with the settings of {resume}; it takes no other ({' '.join(arguments)})")
    console.print("Loading torch and transformers", highlight=False)
    run = _set_up(arguments, resume, console, started)
    with run.stop:
        code = play_out(run, command="sft", started=started)
        from ludic.recipes.sft.report import conclude

        return code, conclude(run, console, config_hash=config_hash(run.recipe))


def _set_up(arguments: Sequence[str], resume: Path | None, console: Console, started: float) -> SFTRun:
    """Everything is built, and every row read, before the folder is made."""
    from ludic.recipes.screen import Screen
    from ludic.recipes.sft.run import SFTDirectory, SFTParts, SFTRun
    from ludic.recipes.sft.schema import compose_sft
    from ludic.recipes.watch import StopRequest

    quiet_libraries()
    directory = SFTDirectory.go_on(resume) if resume is not None else None
    recipe = compose_sft(arguments if directory is None else [str(directory.config)])
    screen = Screen(console, every=recipe.log_every)
    parts = SFTParts.build(recipe)
    run = SFTRun(recipe, parts, directory or SFTDirectory.begin(recipe), screen, StopRequest(screen.note))
    size = sum(parameter.numel() for parameter in parts.model.parameters())
    screen.note(f"sft: {size:,} parameters, seed {recipe.seed}, writing to {run.directory.path}/")
    run.watch.add("set_up", time.perf_counter() - started)
    return run
