"""What `ludic train`, `ludic sft` and `ludic train-rm` do alike: resolve, set up, play, report; and what happens on Ctrl-C."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ludic.errors import ConfigError
from ludic.recipes.compose import to_yaml
from ludic.recipes.console import carry_out, quiet_libraries
from ludic.recipes.process import settled_memory

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.run_directory import Progress, RunDirectory
    from ludic.recipes.screen import Screen
    from ludic.recipes.watch import StopRequest, Stopwatch


class TrainingRun(Protocol):
    """A recipe on its way, in its folder."""

    recipe: Any
    progress: Progress
    screen: Screen
    stop: StopRequest
    watch: Stopwatch

    @property
    def title(self) -> str:
        """What the run is called where it begins."""
        ...

    @property
    def parts(self) -> Any:
        """What it was built of; `model` is one."""
        ...

    @property
    def directory(self) -> RunDirectory: ...

    async def play(self) -> None:
        """What is left to do. Raises `Interrupted` after a stop."""
        ...


D = TypeVar("D", bound="RunDirectory")
R = TypeVar("R", bound=TrainingRun)


class TrainingCommand(Protocol[D, R]):
    """What each of the commands does in its own way. Modules that load torch are imported by the methods alone."""

    @property
    def directory(self) -> type[D]: ...

    def compose(self, arguments: Sequence[str]) -> Any:
        """The recipe of the command line."""
        ...

    def set_up(self, recipe: Any, directory: D | None, screen: Screen, stop: StopRequest) -> R:
        """Everything is built, and all data read, before a folder is made, so that a wrong setting leaves nothing behind. `directory`:
        that of the run to go on with."""
        ...

    def conclude(self, run: R, console: Console) -> str:
        """Write summary and pictures, show the report; the summary as JSON."""
        ...


def run_command(
    command: TrainingCommand[D, R], arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool
) -> int:
    """The exit status: 0, or 128 and the signal's number after a stop. Errors of the user's are raised as `LudicError`."""
    started = time.perf_counter()
    if resume is not None and arguments:
        raise ConfigError(f"--resume goes on with the settings of {resume}; it takes no other setting ({' '.join(arguments)})")
    if print_config:
        directory = None if resume is None else command.directory.go_on(resume)
        print(to_yaml(_recipe(command, arguments, directory)), end="")
        return 0
    return carry_out(lambda console: _train(command, arguments, resume, console, started), json_only=json_only)


def _train(
    command: TrainingCommand[D, R], arguments: Sequence[str], resume: Path | None, console: Console, started: float
) -> tuple[int, str]:
    """The exit status and the summary."""
    console.print("Loading torch and transformers", highlight=False)
    run = _set_up(command, arguments, resume, console)
    run.watch.add("set_up", time.perf_counter() - started)
    with run.stop:
        code = _play_out(run, started)
        return code, command.conclude(run, console)


def _set_up(command: TrainingCommand[D, R], arguments: Sequence[str], resume: Path | None, console: Console) -> R:
    from ludic.recipes.screen import Screen
    from ludic.recipes.tracking import check_trackers
    from ludic.recipes.watch import StopRequest

    quiet_libraries()
    directory = command.directory.go_on(resume) if resume is not None else None
    recipe = _recipe(command, arguments, directory)
    check_trackers(recipe.report_to)
    screen = Screen(console, every=recipe.log_every)
    run = command.set_up(recipe, directory, screen, StopRequest(screen.note))
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in run.parts.model.parameters()]
    whole, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    of_which = f", {trained:,} of them trained" if trained < whole else ""
    screen.note(f"{run.title}: {whole:,} parameters{of_which}, seed {recipe.seed}, writing to {run.directory.path}/")
    return run


def _recipe(command: TrainingCommand[D, R], arguments: Sequence[str], directory: D | None) -> Any:
    """Of the run to go on with, else of the command line."""
    return command.compose(arguments if directory is None else [str(directory.config)])


def _play_out(run: TrainingRun, started: float) -> int:
    """Play `run` to its end or to a stop, and keep where it stands either way: 0, or 128 and the signal's number."""
    from ludic.recipes.watch import Interrupted

    try:
        with settled_memory():
            asyncio.run(run.play())
    except Interrupted:
        run.screen.note(f"Stopped; go on with `ludic {run.directory.command} --resume {run.directory.path}`")
        return 128 + (run.stop.signum or 0)
    finally:
        run.watch.add("wall", time.perf_counter() - started)
        run.directory.write_progress(run.progress)
    return 0
