"""What `ludic train`, `ludic sft` and `ludic train-rm` do alike: resolve, set up, play, report;
and what happens on Ctrl-C."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ludic.cli.console import carry_out, quiet_libraries
from ludic.cli.resume import resume_recipe, wanted_steps
from ludic.recipes.commented import explained
from ludic.runs.directory import DONE, run_path
from ludic.runs.process_memory import settled_memory
from ludic.runs.versions import versions

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.base import TrainingRun
    from ludic.runs.directory import RunDirectory
    from ludic.runs.screen import Screen
    from ludic.runs.stop_request import StopRequest


D = TypeVar("D", bound="RunDirectory")
R = TypeVar("R", bound="TrainingRun[Any, Any, Any]")


class TrainingCommand(Protocol[D, R]):
    """What each of the commands does in its own way. Modules that load torch are imported by the
    methods alone."""

    @property
    def directory(self) -> type[D]: ...

    def compose(self, arguments: Sequence[str]) -> Any:
        """The recipe of the command line."""
        ...

    def build(self, recipe: Any, screen: Screen) -> Any:
        """The parts. All data is read before a folder is made, so that a wrong setting leaves
        nothing behind."""
        ...

    def folder_name(self, recipe: Any) -> str:
        """Of a run without a name."""
        ...

    def run(self, recipe: Any, parts: Any, directory: D, screen: Screen, stop: StopRequest) -> R: ...

    def conclude(self, run: R, console: Console) -> str:
        """Write summary and pictures, show the report; the summary as JSON."""
        ...


def run_command(
    command: TrainingCommand[D, R], arguments: Sequence[str], *, resume: Path | None, json_only: bool, print_config: bool
) -> int:
    """The exit status: 0, or 128 and the signal's number after a stop. Errors of the user's are
    raised as `LudicError`."""
    started = time.perf_counter()
    if print_config:
        if resume is not None:
            wanted_steps(arguments, command.directory.command)
        given = arguments if resume is None else [str(command.directory.look_into(resume).config), *arguments]
        print(explained(command.compose(given)), end="")
        return 0
    return carry_out(lambda console: _train(command, arguments, resume, console, started), json_only=json_only)


def _train(
    command: TrainingCommand[D, R], arguments: Sequence[str], resume: Path | None, console: Console, started: float
) -> tuple[int, str]:
    """The exit status and the summary."""
    steps = None if resume is None else wanted_steps(arguments, command.directory.command)
    directory = None if resume is None else command.directory.go_on(resume)
    try:
        if directory is None:
            recipe = command.compose(arguments)
        else:
            recipe = resume_recipe(command.compose([str(directory.config)]), directory, steps)
        run_path(recipe.output, recipe.name, "run")  # a wrong name is said at once
        console.print("Loading torch and transformers", highlight=False)
        screen, parts = _built(command, recipe, console)
        is_new = directory is None
        directory = directory or command.directory.begin(recipe, command.folder_name(recipe))
        with _failure_noted(directory, is_new=is_new):
            run = _set_up(command, recipe, parts, directory, screen, is_new=is_new)
            run.timer.add("set_up", time.perf_counter() - started)
            with run.stop:
                code = _play_out(run, started)
                return code, command.conclude(run, console)
    finally:
        if directory is not None:
            directory.release()


def _built(command: TrainingCommand[D, R], recipe: Any, console: Console) -> tuple[Screen, Any]:
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
    """What is not as it was when the run was begun, and where nothing is left to do."""
    progress, path, now = run.progress, run.directory.path, versions()
    for name, before in (progress.versions or {}).items():
        if now.get(name, before) != before:
            run.screen.note(f"The run was begun with {name} {before} and goes on with {now[name]}: it may end with other weights")
    if progress.phase == DONE:
        run.screen.note(
            f"{path} is finished, with {progress.steps} steps; this is its report. More: `ludic {run.directory.command} --resume {path} "
            "steps=N`"
        )


@contextmanager
def _failure_noted(directory: RunDirectory, *, is_new: bool) -> Iterator[None]:
    """A run that fails before its first step leaves no folder, unless a server's log is in it;
    any other says in progress.json why."""
    try:
        yield
    except Exception as error:
        if is_new and not directory.has_steps and not directory.server_log.exists():
            shutil.rmtree(directory.path, ignore_errors=True)
        else:
            with suppress(OSError):  # a full disk is what it may have failed of
                progress = directory.read_progress()
                progress.failed = f"{type(error).__name__}: {error}"
                directory.write_progress(progress)
        raise


def _play_out(run: TrainingRun[Any, Any, Any], started: float) -> int:
    """Play `run` to its end or to a stop, and keep where it stands either way: 0, or 128 and the
    signal's number."""
    from ludic.runs.stop_request import Interrupted

    run.progress.failed = None
    try:
        with settled_memory():
            asyncio.run(run.play())
    except Interrupted:
        run.screen.note(f"Stopped; go on with `ludic {run.directory.command} --resume {run.directory.path}`")
        return 128 + (run.stop.signum or 0)
    finally:
        run.timer.add("wall", time.perf_counter() - started)
        run.directory.write_progress(run.progress)
    return 0
