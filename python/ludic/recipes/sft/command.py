"""`ludic sft`: resolve, run, report; and what happens on Ctrl-C."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.errors import ConfigError
from ludic.recipes.command import INTERRUPTED, output_to, quiet_libraries
from ludic.recipes.compose import config_hash, to_yaml

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
    with output_to(json_only) as console:
        try:
            code, summary = _train(arguments, resume, console, started)
        except KeyboardInterrupt:
            console.print("Stopped at once.", highlight=False)
            return INTERRUPTED
    if json_only:
        print(summary, end="")
    return code


def _train(arguments: Sequence[str], resume: Path | None, console: Console, started: float) -> tuple[int, str]:
    """The exit status and the summary."""
    if resume is not None and arguments:
        raise ConfigError(f"--resume goes on with the settings of {resume}; it takes no other ({' '.join(arguments)})")
    console.print("Loading torch and transformers", highlight=False)
    run = _set_up(arguments, resume, console, started)
    with run.stop:
        try:
            code = _play(run)
        finally:
            run.watch.add("wall", time.perf_counter() - started)
            run.directory.write_progress(run.progress)
        from ludic.recipes.sft.report import conclude

        return code, conclude(run, console, config_hash=config_hash(run.recipe))


def _set_up(arguments: Sequence[str], resume: Path | None, console: Console, started: float) -> SFTRun:
    """Everything is built, and every row read, before the folder is made."""
    from ludic.recipes.screen import Screen
    from ludic.recipes.sft.run import SFTDirectory, SFTParts, SFTRun
    from ludic.recipes.sft.schema import compose_sft
    from ludic.recipes.watch import StopRequest

    quiet_libraries()
    directory, recipe = SFTDirectory.go_on(resume) if resume is not None else (None, compose_sft(arguments))
    screen = Screen(console, every=recipe.log_every)
    parts = SFTParts.build(recipe)
    run = SFTRun(recipe, parts, directory or SFTDirectory.begin(recipe), screen, StopRequest(screen.note))
    size = sum(parameter.numel() for parameter in parts.model.parameters())
    screen.note(f"sft: {size:,} parameters, seed {recipe.seed}, writing to {run.directory.path}/")
    run.watch.add("set_up", time.perf_counter() - started)
    return run


def _play(run: SFTRun) -> int:
    from ludic.recipes.run import Interrupted

    try:
        asyncio.run(run.play())
    except Interrupted:
        run.screen.note(f"Stopped; go on with `ludic sft --resume {run.directory.path}`")
        return 128 + (run.stop.signum or 0)
    return 0
