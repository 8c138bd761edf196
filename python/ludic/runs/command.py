"""What runs a recipe: it resolves the settings, opens the folder, sets up, trains and reports, and
handles Ctrl-C. `ludic train`, `sft`, `train-rm` and `dpo` and the objects of `ludic.trainers` are
such commands.

The folder of a run is made, resumed, or on other ranks than 0 found where rank 0 made or resumed
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ludic.files.atomic import write_text
from ludic.images.store import ImageStore, use_store
from ludic.launch.rank_environment import read_rank_environment
from ludic.recipes.compose import choose_devices, devices_left_open
from ludic.recipes.named_sources import check_named_sources
from ludic.recipes.processes import needs_launcher
from ludic.runs.console import quiet_libraries, run_with_console
from ludic.runs.directory import DONE, RunDirectory, check_name, collect_versions, run_path
from ludic.runs.launching import launch
from ludic.runs.on_ranks import RankLog, run_on_ranks
from ludic.runs.report.summary import write_failure
from ludic.runs.resume import Changes, find_steps, parse_changes, resume_run
from ludic.runs.stop_request import Interrupted
from ludic.training.freed_memory import settle_memory

if TYPE_CHECKING:
    from ludic.runs.base import TrainingRun

LAUNCHER = ".launcher"
"""File in the folder of a run on several ranks: which processes started them, a line for each."""


class RunCommand:
    """Runs a recipe to its end. `kind` is the class of the run's folder, which names the class of
    the run: torch is loaded when the run is built."""

    def __init__(
        self,
        kind: type[RunDirectory],
        arguments: Sequence[str] = (),
        *,
        resume: Path | None = None,
        recipe: Any = None,
        is_placed: bool = False,
        on_set_up: Callable[[TrainingRun[Any, Any, Any]], None] | None = None,
    ) -> None:
        """`resume`: the folder of the run to resume. `recipe`: settings that are composed already;
        the settings of a resumed run are compared with them. `is_placed`: a launcher has started
        this process, `ludic worker trainer`. `on_set_up` is called with the run before it plays."""
        self.kind, self.arguments, self.resume = kind, arguments, resume
        self._recipe, self._is_placed, self._on_set_up = recipe, is_placed, on_set_up

    def execute(self, *, json_only: bool = False) -> int:
        """Run the command and return the exit status: 0, or 128 plus the signal's number after a
        stop. User errors are raised as `LudicError`."""
        started = time.perf_counter()

        def work(console: Console, log: RankLog | None) -> tuple[int, str]:
            return self._train(console, started, log)

        if read_rank_environment() is None:
            return run_with_console(lambda console: work(console, None), json_only=json_only)
        config = None if self.resume is None else self.kind.open_to_read(self.resume).config
        section = self._compose(self.arguments if config is None else [str(config)]).ranks
        return run_on_ranks(section, work, json_only=json_only)

    def resolve(self) -> Any:
        """The recipe that `execute` runs; for a run that is resumed, with the changed settings."""
        if self.resume is None:
            return self._compose(self.arguments)
        directory = self.kind.open_to_read(self.resume)
        changes = parse_changes(self.arguments, self.kind.command)
        steps = find_steps(changes, self._compose([str(directory.config)]), directory)
        return self._compose([str(directory.config), *changes.texts, *([] if steps is None else [f"steps={steps}"])])

    def _compose(self, arguments: Sequence[str]) -> Any:
        return self.kind.compose(arguments) if self._recipe is None else deepcopy(self._recipe)

    def _train(self, console: Console, started: float, log: RankLog | None) -> tuple[int, str]:
        """The exit status and the summary. `log`: the log of a rank other than 0, which changes
        nothing in the run's folder and has no summary."""
        with devices_left_open():
            recipe, directory = self.open(follows=log is not None)
        if needs_launcher(recipe.place) and not self._is_placed and read_rank_environment() is None:
            return launch(recipe, lambda: self.begin(recipe), directory, console)
        try:
            with use_store(ImageStore(None if directory is None else directory.images)) as images:
                if log is None and read_rank_environment() is None:  # with several ranks, all have to learn of an error
                    check_named_sources(recipe)
                if directory is None:
                    check_name(recipe.output, recipe.name)
                choose_devices(recipe)
                console.print("Loading torch and transformers")
                from ludic.training import ranks

                run_class, screen, parts = self._build(recipe, console)
                is_new = directory is None
                directory = directory or self.begin(recipe)
                images.settle(directory.images)
                if log is not None:
                    log.open_file(directory.ranks)
                with _use_threads(recipe.threads), _record_failure(directory, screen.note, is_new=is_new):
                    run = run_class(recipe, parts, directory, screen)
                    run.is_placed = self._is_placed
                    if self._on_set_up is not None:
                        self._on_set_up(run)
                    _describe_start(run, is_new=is_new)
                    run.timer.add("set_up", time.perf_counter() - started)
                    with run.stop:
                        code = _play_to_end(run, started)
                        with ranks.rank_0_alone("the report"):
                            return code, run.conclude() if ranks.rank() == 0 else ""
        finally:
            if directory is not None:
                directory.release()

    def _build(self, recipe: Any, console: Console) -> tuple[type[TrainingRun[Any, Any, Any]], Any, Any]:
        """The class of the run, its screen and its parts. With several ranks, an error on one of
        them is raised on all, before there is a folder."""
        from ludic.recipes.model import choose_threads
        from ludic.runs.loggers import Screen, check_trackers
        from ludic.training import ranks
        from ludic.training.backend.optimizers import find_own
        from ludic.training.backend.precision import check_precision

        module, _, name = self.kind.run_class.partition(":")
        with ranks.agree("setting up the run"):
            quiet_libraries()
            check_trackers(recipe.report_to)
            screen = Screen(console, every=recipe.log_every)
            run_class: type[TrainingRun[Any, Any, Any]] = getattr(import_module(module), name)
            parts = run_class.build(recipe, screen.note)
            recipe.threads = choose_threads(recipe, parts.model)
            check_precision(parts.model, master_weights=recipe.trainer.master_weights)
            find_own(recipe.trainer.optimizer)
        return run_class, screen, parts

    def open(self, *, follows: bool) -> tuple[Any, RunDirectory | None]:
        """The recipe of the command line; for a run that is resumed, the recipe of its folder, and
        the folder. `follows`: this is another rank than 0, which resumes the run.

        An agent of torchrun that starts its ranks again gives them the same command line: they
        resume the run that they began before. None of them can tell by itself that it was started
        again."""
        resume = self.resume
        changes = Changes() if resume is None else parse_changes(self.arguments, self.kind.command)
        environment = read_rank_environment()
        if resume is None:
            recipe = self._compose(self.arguments)
            resume = self._find_begun(recipe) if environment is not None and environment.run_id else None
            if resume is None:
                return recipe, None
        if environment is None:
            return resume_run(self.kind, resume, changes, self._compose)
        from ludic.training import ranks

        with ranks.rank_0_alone(f"resuming {resume}"):
            if not follows:
                opened = resume_run(self.kind, resume, changes, self._compose)
        if not follows:
            return opened
        directory = self.kind.follow(resume)
        return self._compose([str(directory.config)]), directory

    def _find_begun(self, recipe: Any) -> Path | None:
        """The folder of the run that one of the present launchers has begun or resumed before; None
        if they did not get so far. Machines come and go: those that are new are written down,
        too."""
        from ludic.training import ranks

        launchers = ranks.gather_json(_name_launcher())

        def find() -> str | None:
            runs = run_path(recipe.output, recipe.name, self.kind.default_name(recipe)).parent
            for mark in sorted(runs.glob(f"*/{LAUNCHER}"), key=lambda mark: mark.stat().st_mtime, reverse=True):
                known = mark.read_text(encoding="utf-8").splitlines()
                if not set(known).isdisjoint(launchers):
                    _write_launchers(mark, [*known, *launchers])
                    return str(mark.parent.resolve())
            return None

        folder = ranks.ask_rank_0("looking for the run that was begun", find)
        return None if folder is None else Path(folder)

    def begin(self, recipe: Any) -> RunDirectory:
        """The folder of a new run, which rank 0 makes."""
        from ludic.training import ranks

        made: list[RunDirectory] = []
        launchers = ranks.gather_json(_name_launcher())
        with ranks.rank_0_alone("making the run's folder") as shared:
            if ranks.rank() == 0:
                made.append(self.kind.begin(recipe))
                if ranks.is_distributed():
                    _write_launchers(made[0].path / LAUNCHER, launchers)
                shared.append(str(made[0].path.resolve()))
        return made[0] if made else self.kind.follow(Path(shared[0]))


def _write_launchers(mark: Path, launchers: Sequence[str]) -> None:
    write_text(mark, "".join(f"{name}\n" for name in dict.fromkeys(launchers)))


def _name_launcher() -> str:
    """Names the process that started this rank, and starts it again, and the command. Its start
    time tells it from another one with its number."""
    parent = os.getppid()
    command = hashlib.sha256("\0".join(sys.argv[1:]).encode(errors="surrogateescape")).hexdigest()[:16]
    started = ""  # in clock ticks since the system started, where the system says it
    with suppress(OSError):
        started = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{socket.gethostname()} {parent} {started} {command}"


def _describe_start(run: TrainingRun[Any, Any, Any], *, is_new: bool) -> None:
    """Print the model, the data and the devices of the training. Of a resumed run, tell how this
    environment differs from the one that it began in, and whether it is finished."""
    from ludic.models.loading import describe_device
    from ludic.models.quantization import count_weights

    trained, frozen = (count_weights(run.parts.model, trained=flag) for flag in (True, False))
    whole, path, progress = trained + frozen, run.directory.path, run.progress
    of_which = f", {trained:,} of them trained" if trained < whole else ""
    run.screen.note(f"{run.title}: {whole:,} parameters{of_which}, seed {run.recipe.seed}, writing to {path}/")
    run.screen.note(f"On {describe_device(run.parts.model)}")
    if is_new:
        return
    now = collect_versions()
    for name, before in (progress.versions or {}).items():
        if now.get(name, before) != before:
            run.screen.note(f"The run began with {name} {before} and resumes with {now[name]}: its final weights may differ")
    if progress.phase == DONE:
        run.screen.note(
            f"{path} is finished, with {progress.steps} steps; this is its report. For more steps: "
            f"`ludic {run.directory.command} --resume {path} steps=+N`"
        )


@contextmanager
def _use_threads(threads: int) -> Iterator[None]:
    """Inside, torch has `threads` threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _record_failure(directory: RunDirectory, note: Callable[[str], None], *, is_new: bool) -> Iterator[None]:
    """Delete the folder of a run that fails before its first step, unless it has a server's log.
    Otherwise write the error to progress.json and summary.json, and say how to go on. Another rank
    than 0 leaves all that to rank 0."""
    from ludic.training import ranks

    try:
        yield
    except Exception as caught:
        error = ranks.explain(caught)
        if directory.is_follower:
            pass  # rank 0 does it
        elif is_new and not directory.has_steps and not directory.server_log.exists():
            shutil.rmtree(directory.path, ignore_errors=True)
        else:
            note(f"What was done is kept; go on with `ludic {directory.command} --resume {directory.path}`")
            with suppress(OSError):  # the disk may be full
                progress = directory.read_progress()
                progress.failed = f"{type(error).__name__}: {error}"
                directory.write_progress(progress)
                write_failure(directory, progress)
        if error is caught:
            raise
        raise error from caught


def _play_to_end(run: TrainingRun[Any, Any, Any], started: float) -> int:
    """Run to the end or to a stop, and save the progress either way. Returns 0, or 128 plus the
    signal's number."""
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
