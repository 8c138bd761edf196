"""What `ludic train`, `sft`, `train-rm` and `dpo` share: resolve the settings, set up, run, report,
and handle Ctrl-C."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ludic.cli.console import quiet_libraries, run_with_console
from ludic.cli.launching import launch
from ludic.cli.opening import begin_run, open_run
from ludic.cli.print_config import format_recipe
from ludic.cli.ranked_command import run_on_ranks
from ludic.cli.resume import find_steps, parse_changes
from ludic.rank_environment import read_rank_environment
from ludic.recipes.devices import choose_devices, devices_left_open
from ludic.recipes.named_sources import check_named_sources
from ludic.recipes.place_section import needs_launcher
from ludic.runs.directory import DONE, check_name
from ludic.runs.process_memory import settle_memory
from ludic.runs.versions import collect_versions

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.base import TrainingRun
    from ludic.runs.directory import RunDirectory
    from ludic.runs.rank_log import RankLog
    from ludic.runs.screen import Screen
    from ludic.runs.stop_request import StopRequest


D = TypeVar("D", bound="RunDirectory")
R = TypeVar("R", bound="TrainingRun[Any, Any, Any]")


class TrainingCommand(Protocol[D, R]):
    """The parts in which the commands differ. Modules that load torch are imported inside the
    methods."""

    @property
    def directory(self) -> type[D]: ...

    @property
    def is_placed(self) -> bool:
        """Whether this is a process that a launcher has started, `ludic worker trainer`."""
        ...

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
    environment = read_rank_environment()
    if print_config:
        if environment is None or environment.rank == 0:
            print(format_recipe(command.compose(_list_sources(command, arguments, resume))), end="")
        return 0

    def work(console: Console, log: RankLog | None) -> tuple[int, str]:
        return _train(command, arguments, resume, console, started, log)

    if environment is None:
        return run_with_console(lambda console: work(console, None), json_only=json_only)
    section = command.compose(arguments if resume is None else _list_sources(command, [], resume)).ranks
    return run_on_ranks(section, work, json_only=json_only)


def _list_sources(command: TrainingCommand[D, R], arguments: Sequence[str], resume: Path | None) -> Sequence[str]:
    """The arguments from which the recipe is composed: for a run that is resumed, its settings
    first."""
    if resume is None:
        return arguments
    directory = command.directory.open_to_read(resume)
    changes = parse_changes(arguments, directory.command)
    steps = find_steps(changes, command.compose([str(directory.config)]), directory)
    return [str(directory.config), *changes.texts, *([] if steps is None else [f"steps={steps}"])]


def _train(
    command: TrainingCommand[D, R],
    arguments: Sequence[str],
    resume: Path | None,
    console: Console,
    started: float,
    log: RankLog | None,
) -> tuple[int, str]:
    """The exit status and the summary. `log`: that of a rank other than 0, which changes nothing
    in the run's folder and has no summary."""
    with devices_left_open():
        recipe, directory = open_run(command, arguments, resume, follows=log is not None)
    if needs_launcher(recipe.place) and not command.is_placed and read_rank_environment() is None:
        return launch(recipe, lambda: begin_run(command, recipe), directory, console)
    try:
        if log is None and read_rank_environment() is None:  # with several ranks, all have to learn of an error
            check_named_sources(recipe)
        if directory is None:
            check_name(recipe.output, recipe.name)
        choose_devices(recipe)
        console.print("Loading torch and transformers", highlight=False)
        screen, parts = _build_parts(command, recipe, console)
        is_new = directory is None
        directory = directory or begin_run(command, recipe)
        if log is not None:
            log.open_file(directory.ranks)
        with _record_failure(directory, screen, is_new=is_new):
            run = _set_up(command, recipe, parts, directory, screen, is_new=is_new)
            run.timer.add("set_up", time.perf_counter() - started)
            with run.stop:
                code = _run_to_end(run, started)
                return code, _conclude(command, run, console)
    finally:
        if directory is not None:
            directory.release()


def _build_parts(command: TrainingCommand[D, R], recipe: Any, console: Console) -> tuple[Screen, Any]:
    """With several ranks, an error on one of them is raised on all, before there is a folder."""
    from ludic.runs.screen import Screen
    from ludic.runs.tracking import check_trackers
    from ludic.training import ranks
    from ludic.training.backend.master_weights import check_precision

    with ranks.agree("setting up the run"):
        quiet_libraries()
        check_trackers(recipe.report_to)
        screen = Screen(console, every=recipe.log_every)
        parts = command.build(recipe, screen)
        check_precision(parts.model)
    return screen, parts


def _conclude(command: TrainingCommand[D, R], run: R, console: Console) -> str:
    """The summary, which rank 0 writes; the other ranks wait for it and have none."""
    from ludic.training import ranks

    with ranks.rank_0_alone("the report"):
        return command.conclude(run, console) if ranks.rank() == 0 else ""


def _set_up(command: TrainingCommand[D, R], recipe: Any, parts: Any, directory: D, screen: Screen, *, is_new: bool) -> R:
    from ludic.models.device import describe_device
    from ludic.models.quantization import count_weights
    from ludic.runs.stop_request import make_stop_request

    run = command.run(recipe, parts, directory, screen, make_stop_request(screen.note))
    trained, frozen = (count_weights(run.parts.model, trained=flag) for flag in (True, False))
    whole = trained + frozen
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
            f"`ludic {run.directory.command} --resume {path} steps=+N`"
        )


@contextmanager
def _record_failure(directory: RunDirectory, screen: Screen, *, is_new: bool) -> Iterator[None]:
    """Delete the folder of a run that fails before its first step, unless it has a server's log.
    Otherwise write the error to progress.json and summary.json, and say how to go on. Another rank
    than 0 leaves all that to rank 0."""
    from ludic.runs.report.provenance import write_failure
    from ludic.training import ranks

    try:
        yield
    except Exception as caught:
        error = ranks.explain(caught)
        if directory.is_followed:
            pass  # rank 0 does it
        elif is_new and not directory.has_steps and not directory.server_log.exists():
            shutil.rmtree(directory.path, ignore_errors=True)
        else:
            screen.note(f"What was done is kept; go on with `ludic {directory.command} --resume {directory.path}`")
            with suppress(OSError):  # the disk may be full
                progress = directory.read_progress()
                progress.failed = f"{type(error).__name__}: {error}"
                directory.write_progress(progress)
                write_failure(directory, progress)
        if error is caught:
            raise
        raise error from caught


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
        return 128 + (run.stop.signum or 0 if run.stop else 0)
    finally:
        run.timer.add("wall", time.perf_counter() - started)
        run.directory.write_progress(run.progress)
    return 0
