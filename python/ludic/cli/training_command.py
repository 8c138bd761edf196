"""What `ludic train`, `sft`, `train-rm` and `dpo` share: resolve the settings, set up, run, report,
and handle Ctrl-C.

The recipe and the folder of a run: made, resumed, or on other ranks than 0 found where rank 0
made or resumed it.

A command can be one of several processes that torchrun or srun started: it joins the others, a
watchdog ends it if it hangs, and an error ends all of them. Rank 0 prints and writes as a single
process does. The others write to `ranks/rank_NNNN.log`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ludic.cli.console import INTERRUPTED, quiet_libraries, run_with_console
from ludic.cli.launching import launch
from ludic.cli.print_config import format_recipe
from ludic.cli.resume import Changes, find_steps, parse_changes, resume_recipe, save_changes
from ludic.cli.user_errors import rank_exit_status
from ludic.errors import TRY_AGAIN
from ludic.files.atomic import write_text
from ludic.launch.rank_environment import RankEnvironment, read_rank_environment, tell_status
from ludic.recipes.devices import choose_devices, devices_left_open
from ludic.recipes.named_sources import check_named_sources
from ludic.recipes.place_section import needs_launcher
from ludic.recipes.ranks_section import RanksSection, check_ranks, phase_deadlines
from ludic.runs.directory import DONE, check_name, run_path
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
    from ludic.models.loading import describe_device
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


LAUNCHER = ".launcher"
"""File in the folder of a run on several ranks: which processes started them, a line for each."""
D_co = TypeVar("D_co", bound="RunDirectory", covariant=True)


class OpeningCommand(Protocol[D_co]):
    """The members of a command that open its runs."""

    @property
    def directory(self) -> type[D_co]: ...

    def compose(self, arguments: Sequence[str]) -> Any: ...

    def folder_name(self, recipe: Any) -> str: ...


def open_run(command: OpeningCommand[D], arguments: Sequence[str], resume: Path | None, *, follows: bool) -> tuple[Any, D | None]:
    """The recipe of the command line; for a run that is resumed, that of its folder, and the
    folder. `follows`: this is another rank than 0, which resumes the run.

    An agent of torchrun that starts its ranks again gives them the same command line: they resume
    the run that they began before. None of them can tell by itself that it was started again."""
    changes = Changes() if resume is None else parse_changes(arguments, command.directory.command)
    environment = read_rank_environment()
    if resume is None:
        recipe = command.compose(arguments)
        resume = _find_begun(command, recipe) if environment is not None and environment.run_id else None
        if resume is None:
            return recipe, None
    if environment is None:
        return _resume(command, resume, changes)
    from ludic.training import ranks

    opened: list[tuple[Any, D]] = []
    with ranks.rank_0_alone(f"resuming {resume}"):
        if not follows:
            opened.append(_resume(command, resume, changes))
    if not follows:
        return opened[0]
    directory = command.directory.follow(resume)
    return command.compose([str(directory.config)]), directory


def _find_begun(command: OpeningCommand[D], recipe: Any) -> Path | None:
    """The folder of the run that one of the present launchers has begun or resumed before; None if
    they did not get so far. Machines come and go: those that are new are written down, too."""
    from ludic.training import ranks

    launchers = ranks.gather_json(_name_launcher())

    def find() -> str | None:
        runs = run_path(recipe.output, recipe.name, command.folder_name(recipe)).parent
        for mark in sorted(runs.glob(f"*/{LAUNCHER}"), key=lambda mark: mark.stat().st_mtime, reverse=True):
            known = mark.read_text(encoding="utf-8").splitlines()
            if not set(known).isdisjoint(launchers):
                _write_launchers(mark, [*known, *launchers])
                return str(mark.parent.resolve())
        return None

    folder = ranks.ask_rank_0("looking for the run that was begun", find)
    return None if folder is None else Path(folder)


def _write_launchers(mark: Path, launchers: Sequence[str]) -> None:
    write_text(mark, "".join(f"{name}\n" for name in dict.fromkeys(launchers)))


def _name_launcher() -> str:
    """Names the process that started this rank, and starts it again, and the command. Its start
    time tells it from another one with its number."""
    parent = os.getppid()
    command = hashlib.sha256("\0".join(sys.argv[1:]).encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{socket.gethostname()} {parent} {_read_start_time(parent)} {command}"


def _read_start_time(process: int) -> str:
    """Clock ticks since the system started; empty where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _resume(command: OpeningCommand[D], resume: Path, changes: Changes) -> tuple[Any, D]:
    directory = command.directory.resume(resume)
    try:
        recipe = command.compose([str(directory.config), *changes.texts])
        recipe = resume_recipe(recipe, directory, changes)
        save_changes(changes, recipe, directory)
        return recipe, directory
    except BaseException:
        directory.release()
        raise


def begin_run(command: OpeningCommand[D], recipe: Any) -> D:
    """The folder of a new run, which rank 0 makes."""
    from ludic.training import ranks

    made: list[D] = []
    launchers = ranks.gather_json(_name_launcher())
    with ranks.rank_0_alone("making the run's folder") as shared:
        if ranks.rank() == 0:
            made.append(command.directory.begin(recipe, command.folder_name(recipe)))
            if ranks.is_distributed():
                _write_launchers(made[0].path / LAUNCHER, launchers)
            shared.append(str(made[0].path.resolve()))
    return made[0] if made else command.directory.follow(Path(shared[0]))


ENDING_S = 60.0
"""How long a rank may take to end after an error."""


def run_on_ranks(section: RanksSection, work: Callable[[Console, RankLog | None], tuple[int, str]], *, json_only: bool) -> int:
    """Run `work`, which returns (exit status, summary), on all ranks, and return the exit status.
    It gets the log of its rank, and None on rank 0."""
    from rich.console import Console

    from ludic.runs.rank_log import RankLog
    from ludic.training import ranks

    check_ranks(section)
    environment = read_rank_environment(port=section.port)
    assert environment is not None
    timeouts = {"timeout_s": section.timeout_s, "rendezvous_timeout_s": section.rendezvous_timeout_s}
    with ranks.joined(environment, **timeouts, exit_code=rank_exit_status), _watched(environment, section):
        if environment.rank == 0:
            return run_with_console(lambda console: _lead(work, console), json_only=json_only)
        with RankLog(environment.rank) as log, log.in_use():
            return work(Console(file=cast(IO[str], log), soft_wrap=True), log)[0]


@contextmanager
def ended_as_rank() -> Iterator[None]:
    """End the process of a rank where the block ends, without clean-up: everything is written
    then, and threads of torch's process groups may wait for other ranks, or abort the process."""
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    tell_status(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _lead(work: Callable[[Console, RankLog | None], tuple[int, str]], console: Console) -> tuple[int, str]:
    """`work` on rank 0. The other ranks are told of a second Ctrl-C, which ends it at once."""
    from ludic.training import ranks
    from ludic.training.ranks.meeting import Failure

    try:
        return work(console, None)
    except KeyboardInterrupt:
        meeting = ranks.current_meeting()
        if meeting is not None:
            meeting.report_failure(Failure(0, meeting.host, "interrupted", INTERRUPTED))
        raise


@contextmanager
def _watched(environment: RankEnvironment, section: RanksSection) -> Iterator[None]:
    """Run the block under the watchdog. After an error it watches the end of the process too."""
    from ludic.training import ranks
    from ludic.training.ranks.meeting import Failure
    from ludic.training.watchdog import Watchdog

    meeting = ranks.current_meeting()
    assert meeting is not None

    def find_failure() -> tuple[str, int] | None:
        try:
            meeting.give_sign()
            failure, ended = meeting.find_failure(), meeting.describe_ended()
        except Exception:  # the store is gone: the main thread finds it too
            return None
        if failure is not None:
            return f"rank {failure.rank} failed, on {failure.host}: {failure.text}", failure.exit_code
        return None if ended is None else (ended, TRY_AGAIN)

    dog = Watchdog(
        {**phase_deadlines(section), "ending": ENDING_S},
        name=f"rank {environment.rank} of {environment.world_size}",
        find_failure=find_failure,
        report=lambda why: meeting.report_failure(Failure(environment.rank, meeting.host, why)),
    )
    dog.start()
    try:
        yield
    except BaseException:
        dog.enter_last("ending")
        raise
    dog.close()
