"""What `ludic train`, `ludic sft` and `ludic train-rm` share: resolve the settings, set up, run,
report, and handle Ctrl-C."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ludic.cli.console import quiet_libraries, run_with_console
from ludic.cli.print_config import format_recipe
from ludic.cli.resume import parse_resume_steps, resume_recipe
from ludic.runs.directory import DONE, run_path
from ludic.runs.process_memory import settle_memory
from ludic.runs.versions import collect_versions

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.base import TrainingRun
    from ludic.runs.directory import RunDirectory
    from ludic.runs.screen import Screen
    from ludic.runs.stop_request import StopRequest


D = TypeVar("D", bound="RunDirectory")
R = TypeVar("R", bound="TrainingRun[Any, Any, Any]")


class TrainingCommand(Protocol[D, R]):
    """The parts in which the commands differ. Modules that load torch are imported inside the
    methods."""

    @property
    def directory(self) -> type[D]: ...

    def compose(self, arguments: Sequence[str]) -> Any:
        """The recipe of the command line."""
        ...

    def build(self, recipe: Any, screen: Screen) -> Any:
        """The parts of the run. All data is read here, before a folder is made, so that a wrong
        setting leaves nothing behind."""
        ...

    def folder_name(self, recipe: Any) -> str:
        """The name of the folder of a run without a name."""
        ...

    def run(self, recipe: Any, parts: Any, directory: D, screen: Screen, stop: StopRequest) -> R: ...

    def conclude(self, run: R, console: Console) -> str:
        """Write the summary and the plots, show the report, and return the summary as JSON."""
        ...


def run_command(
    command: TrainingCommand[D, R], arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool
) -> int:
    """Run the command and return the exit status: 0, or 128 plus the signal's number after a stop.
    User errors are raised as `LudicError`."""
    started = time.perf_counter()
    if print_config:
        if resume is not None:
            parse_resume_steps(arguments, command.directory.command)
        sources = arguments if resume is None else [str(command.directory.open_to_read(resume).config), *arguments]
        print(format_recipe(command.compose(sources)), end="")
        return 0
    return run_with_console(lambda console: _train(command, arguments, resume, console, started), json_only=json_only)


def _train(
    command: TrainingCommand[D, R], arguments: Sequence[str], resume: Path | None, console: Console, started: float
) -> tuple[int, str]:
    """The exit status and the summary."""
    steps = None if resume is None else parse_resume_steps(arguments, command.directory.command)
    directory = None if resume is None else command.directory.resume(resume)
    try:
        if directory is None:
            recipe = command.compose(arguments)
        else:
            recipe = resume_recipe(command.compose([str(directory.config)]), directory, steps)
        run_path(recipe.output, recipe.name, "run")  # raises for an invalid name
        console.print("Loading torch and transformers", highlight=False)
        screen, parts = _build_parts(command, recipe, console)
        is_new = directory is None
        directory = directory or command.directory.begin(recipe, command.folder_name(recipe))
        with _record_failure(directory, is_new=is_new):
            run = _set_up(command, recipe, parts, directory, screen, is_new=is_new)
            run.timer.add("set_up", time.perf_counter() - started)
            with run.stop:
                code = _run_to_end(run, started)
                return code, command.conclude(run, console)
    finally:
        if directory is not None:
            directory.release()


def _build_parts(command: TrainingCommand[D, R], recipe: Any, console: Console) -> tuple[Screen, Any]:
    from ludic.runs.screen import Screen
    from ludic.runs.tracking import check_trackers
    from ludic.training.backend.master_weights import check_precision

    quiet_libraries()
    check_trackers(recipe.report_to)
    screen = Screen(console, every=recipe.log_every)
    parts = command.build(recipe, screen)
    check_precision(parts.model)
    return screen, parts


def _set_up(command: TrainingCommand[D, R], recipe: Any, parts: Any, directory: D, screen: Screen, *, is_new: bool) -> R:
    from ludic.models.device import describe_device
    from ludic.runs.stop_request import StopRequest

    run = command.run(recipe, parts, directory, screen, StopRequest(screen.note))
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in run.parts.model.parameters()]
    whole, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    of_which = f", {trained:,} of them trained" if trained < whole else ""
    screen.note(f"{run.title}: {whole:,} parameters{of_which}, seed {recipe.seed}, writing to {run.directory.path}/")
    screen.note(f"On {describe_device(run.parts.model)}")
    if not is_new:
        _note_state(run)
    return run


def _note_state(run: TrainingRun[Any, Any, Any]) -> None:
    """Tell how this environment differs from the one that the run began in, and whether the run is
    finished."""
    progress, path, now = run.progress, run.directory.path, collect_versions()
    for name, before in (progress.versions or {}).items():
        if now.get(name, before) != before:
            run.screen.note(f"The run began with {name} {before} and resumes with {now[name]}: its final weights may differ")
    if progress.phase == DONE:
        run.screen.note(
            f"{path} is finished, with {progress.steps} steps; this is its report. For more steps: "
            f"`ludic {run.directory.command} --resume {path} steps=N`"
        )


@contextmanager
def _record_failure(directory: RunDirectory, *, is_new: bool) -> Iterator[None]:
    """Delete the folder of a run that fails before its first step, unless it has a server's log.
    Otherwise write the error to progress.json."""
    try:
        yield
    except Exception as error:
        if is_new and not directory.has_steps and not directory.server_log.exists():
            shutil.rmtree(directory.path, ignore_errors=True)
        else:
            with suppress(OSError):  # the disk may be full
                progress = directory.read_progress()
                progress.failed = f"{type(error).__name__}: {error}"
                directory.write_progress(progress)
        raise


def _run_to_end(run: TrainingRun[Any, Any, Any], started: float) -> int:
    """Run to the end or to a stop, and save the progress either way. Returns 0, or 128 plus the
    signal's number."""
    from ludic.runs.stop_request import Interrupted

    run.progress.failed = None
    try:
        with settle_memory():
            asyncio.run(run.play())
    except Interrupted:
        run.screen.note(f"Stopped; resume with `ludic {run.directory.command} --resume {run.directory.path}`")
        return 128 + (run.stop.signum or 0)
    finally:
        run.timer.add("wall", time.perf_counter() - started)
        run.directory.write_progress(run.progress)
    return 0
