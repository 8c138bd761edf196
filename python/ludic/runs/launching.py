"""A run whose processes are all started and watched by the command of the user, which trains
nothing itself: several trainers on this machine, and everything on Ray or Slurm.

The processes write to `RUN/workers`; what the trainers write there is shown here too. The place
that the recipe names is this machine, a Ray cluster, or the script of a Slurm job.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.errors import TRY_AGAIN, ConfigError
from ludic.files.atomic import write_text
from ludic.launch.local import LocalPlace
from ludic.launch.process import DONE, Place, Process
from ludic.launch.ray import RayPlace
from ludic.launch.slurm import SlurmJob, assign_nodes, write_script
from ludic.launch.supervisor import Supervisor
from ludic.recipes.actors import check_actors, uses_queue
from ludic.recipes.processes import TrainersSection, choose_kind
from ludic.recipes.schema import AUTO, Recipe
from ludic.runs.directory import run_path
from ludic.runs.lock import LAUNCH_LOCK, RunLock
from ludic.runs.plan import ACTOR, TRAINER, plan_processes

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.directory import RunDirectory

SIGNALLED = 128
"""Exit statuses from here on belong to a process that a signal ended or stopped."""


def launch(recipe: Any, begin: Callable[[], RunDirectory], directory: RunDirectory | None, console: Console) -> tuple[int, str]:
    """Run the processes of a recipe to their end. Returns the exit status of the trainer and the
    summary. `directory` is the folder of a run that is resumed; otherwise `begin` makes it."""
    is_new = directory is None
    if isinstance(recipe, Recipe):
        check_actors(recipe)
    run_path(recipe.output, recipe.name, "run")  # raises for an invalid name
    directory = directory or begin()
    try:
        lock = RunLock(directory.path, LAUNCH_LOCK)
    finally:
        directory.release()  # the trainer locks it
    status = None
    try:
        status = _run_processes(recipe, directory.path, console)
    finally:
        lock.release()
        if is_new and _has_failed(status) and not (directory.has_steps or directory.server_log.exists()):
            shutil.rmtree(directory.path, ignore_errors=True)  # as a run of one process that fails before its first step
    is_done = status == DONE and directory.summary.is_file()
    return status, directory.summary.read_text(encoding="utf-8") if is_done else ""


def _has_failed(status: int | None) -> bool:
    """Whether the run ended by its own error (raised here if None), which it would meet again: not
    if a launcher may try again, nor after a stop or a kill."""
    return status is None or (status not in (DONE, TRY_AGAIN) and status < SIGNALLED)


def _run_processes(recipe: Any, folder: Path, console: Console) -> int:
    def note(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    processes = plan_processes(recipe, folder)
    if (lacking := describe_lacking_gpus(recipe, processes)) is not None:
        note(lacking)
    if recipe.place.on == "slurm":
        _make_run_id(recipe, folder)
        note(describe_submission(write_job(recipe.place, processes, folder)))
        return DONE
    note(f"{folder}: {_count(processes, recipe.place.trainers)} on {recipe.place.on}")
    if isinstance(recipe, Recipe) and uses_queue(recipe):
        _open_queue(recipe, folder, note)
    trainers = [process.name for process in processes if process.role == TRAINER]
    with closing(open_place(recipe.place, processes, folder)) as place, _shown_logs(folder, trainers, console) as show:

        def sleep(seconds: float) -> None:
            time.sleep(seconds)
            show()

        def note_end(text: str) -> None:  # the end of a trainer's log is shown already
            note(text.partition("\n")[0] if text.startswith(tuple(trainers)) else text)

        return Supervisor(
            place,
            processes,
            folder=folder,
            place_name=recipe.place.on,
            least=_least_trainers(recipe.place),
            stop_grace_s=recipe.place.stop_s,
            note=note_end,
            sleep=sleep,
        ).run()


def _least_trainers(section: Any) -> int | None:
    return section.min_nodes if section.trainers > 1 else None


def _count(processes: Sequence[Process], trainers: int) -> str:
    """Example: `2 trainers, 1 actor`. One process of the plan starts all trainers of a machine."""
    counts = {**Counter(process.role for process in processes), TRAINER: trainers}
    return ", ".join(f"{count} {role}{'s' * (count > 1)}" for role, count in counts.items())


def _make_run_id(recipe: Any, folder: Path) -> None:
    from ludic.runs.actors.queue import make_run_id

    if isinstance(recipe, Recipe) and uses_queue(recipe):
        make_run_id(folder)


def _open_queue(recipe: Recipe, folder: Path, note: Callable[[str], None]) -> None:
    """Open the queue before an actor looks at it. Ctrl-C ends a wait for its server."""
    from ludic.runs.actors.reopening import reopen_queue
    from ludic.runs.stop_request import StopRequest

    asyncio.run(reopen_queue(recipe.queue, folder, StopRequest(note)))


@contextmanager
def _shown_logs(folder: Path, names: Sequence[str], console: Console) -> Iterator[Callable[[], None]]:
    """Yields a function that prints what the processes have written since it was called last; at
    exit the rest is printed."""
    ends = {path: _size(path) for path in (folder / "workers" / f"{name}.log" for name in names)}

    def show() -> None:
        for path, end in ends.items():
            with suppress(OSError), path.open("rb") as log:
                log.seek(end if end <= _size(path) else 0)  # it begins anew once it is long
                text = log.read()
                lines, newline, _ = text.rpartition(b"\n")
                if newline:
                    console.print(lines.decode("utf-8", errors="replace"), highlight=False, markup=False)
                    ends[path] = log.tell() - len(text) + len(lines) + 1

    try:
        yield show
    finally:
        show()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


SCRIPT = "job.sh"
NOTICE_MARGIN_S = 60
"""What a Slurm job has left after `place.stop_s`: the others end, and it is queued again."""


def open_place(section: TrainersSection, processes: Sequence[Process], folder: Path) -> Place:
    """The place on which the processes can be started. Raises LaunchError if it has no room."""
    if section.on == "ray":
        return RayPlace(processes, folder, address=section.address or "auto", insecure=section.insecure)
    return LocalPlace(folder)


def describe_lacking_gpus(recipe: Any, processes: Sequence[Process]) -> str | None:
    """What to tell the user if Ray or Slurm will show no GPU to processes that may compute on one;
    None if each has one, or they compute on the CPU. Actors that ask servers need none."""
    if recipe.place.on == "local" or not recipe.trainer.model_device.startswith((AUTO, "cuda")):
        return None
    asks = isinstance(recipe, Recipe) and choose_kind(recipe.inference) == "vllm"
    roles = dict.fromkeys(process.role for process in processes if process.gpus == 0 and not (asks and process.role == ACTOR))
    if not roles:
        return None
    settings = " ".join(f"place.{role}_gpus=1" for role in roles)
    return (
        f"No GPU is reserved for the {' and the '.join(roles)} on {recipe.place.on}; set {settings}, or trainer.model_device=cpu if they "
        "are to compute on the CPU"
    )


def write_job(section: TrainersSection, processes: Sequence[Process], folder: Path) -> Path:
    """Write the batch script of the run, and return its path. Nodes are as small as the processes
    allow."""
    job = fit_job(section, processes, re.sub(r"[^A-Za-z0-9_.-]", "_", folder.name))
    path = folder / SCRIPT
    write_text(path, write_script(processes, folder.absolute(), job, cwd=Path.cwd()))
    path.chmod(0o755)
    return path


def fit_job(section: TrainersSection, processes: Sequence[Process], name: str) -> SlurmJob:
    """The smallest nodes, all alike, on which the processes have room. Example: two processes with
    8 CPUs and one with 2 on two nodes need 10 CPUs each. Raises ConfigError for a share of a CPU or
    GPU, which Slurm does not have."""

    def make(cpus: int, gpus: int) -> SlurmJob:
        options = tuple(section.slurm_options)
        return SlurmJob(
            name,
            section.nodes,
            cpus,
            gpus,
            time=section.slurm_time,
            notice_s=math.ceil(section.stop_s) + NOTICE_MARGIN_S,
            python=sys.executable,
            options=options,
        )

    def fits(cpus: int, gpus: int) -> bool:
        try:
            assign_nodes(processes, make(cpus, gpus))
        except ConfigError:
            return False
        return True

    all_cpus = math.ceil(sum(max(1.0, process.cpus) for process in processes))
    all_gpus = math.ceil(sum(process.gpus for process in processes))
    assign_nodes(processes, make(all_cpus, all_gpus))  # raises for shares; whole numbers have room on the first node
    cpus = next(cpus for cpus in range(1, all_cpus + 1) if fits(cpus, all_gpus))
    return make(cpus, next(gpus for gpus in range(all_gpus + 1) if fits(cpus, gpus)))


def describe_submission(script: Path) -> str:
    return f"Wrote {script}; submit it with `sbatch {os.path.relpath(script)}`"
