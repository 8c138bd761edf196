"""The processes of a run, from its recipe; and a run whose processes are all started and watched by
the command of the user, which trains nothing itself: several trainers on this machine, and
everything on Ray or Slurm.

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
from typing import Any

from rich.console import Console

from ludic.errors import TRY_AGAIN, ConfigError
from ludic.files.atomic import write_text
from ludic.launch.local import LOOPBACK, LocalPlace
from ludic.launch.process import DONE, PYTHON, Place, Process
from ludic.launch.ray import RayPlace
from ludic.launch.slurm import SlurmJob, assign_nodes, write_script
from ludic.launch.supervisor import Supervisor
from ludic.launch.torchrun import ENV, PORT, STOP_VARIABLE, torchrun_argv
from ludic.recipes.actors import check_actors, uses_queue
from ludic.recipes.epochs_schema import EpochsRecipe
from ludic.recipes.processes import PlaceSection, TrainersSection, choose_kind, is_on_one_machine
from ludic.recipes.schema import AUTO, Recipe
from ludic.runs.actors.queue import make_run_id, reopen_queue
from ludic.runs.directory import RunDirectory, run_path
from ludic.runs.lock import LAUNCH_LOCK, RunLock
from ludic.runs.stop_request import StopRequest

TRAINER, ACTOR, SERVER = "trainer", "actor", "server"
"""The roles; `ludic worker ROLE RUN` is what a process of a role executes."""


def plan_processes(recipe: Recipe | EpochsRecipe, folder: Path) -> list[Process]:
    """The trainers, the servers and the actors of the run in `folder`, in the order in which they
    are started.

    Several trainers are the ranks of one agent of torchrun on each machine. Example: with
    `place.trainers=8 place.nodes=2 place.actors=2` the names are trainer0, trainer1, actor0,
    actor1, and trainer0 starts four ranks.
    """
    run, place = str(folder.resolve()), recipe.place
    processes = _plan_trainers(recipe, run)
    if not isinstance(place, PlaceSection):
        return processes
    for name in list_servers(place):  # on one machine servers listen to it alone, elsewhere at the address of their machine
        host = LOOPBACK if is_on_one_machine(place) else f"{{host:{name}}}"
        command = _worker(SERVER, run, "--name", name, "--host", host)
        processes.append(Process(name, SERVER, command, place.server_cpus, place.server_gpus, restarts=place.restarts))
    for name in (f"{ACTOR}{number}" for number in range(place.actors)):
        command = _worker(ACTOR, run, "--name", name)
        processes.append(Process(name, ACTOR, command, place.actor_cpus, place.actor_gpus, restarts=place.restarts))
    return processes


def _plan_trainers(recipe: Recipe | EpochsRecipe, run: str) -> list[Process]:
    place, command = recipe.place, _worker(TRAINER, run)
    if place.trainers == 1:
        return [Process(TRAINER, TRAINER, command, place.trainer_cpus, place.trainer_gpus, restarts=place.restarts)]
    each = place.trainers // place.nodes
    names = [TRAINER] if place.nodes == 1 else [f"{TRAINER}{node}" for node in range(place.nodes)]
    return [
        Process(
            name,
            TRAINER,
            torchrun_argv(
                command[1:],
                ranks=each,
                nodes=place.nodes,
                min_nodes=place.min_nodes,
                node=node,
                host=f"{{host:{names[0]}}}",
                port=recipe.ranks.port or PORT,
                run_id=Path(run).name,
                rendezvous_timeout_s=int(recipe.ranks.rendezvous_timeout_s),
            ),
            cpus=each * place.trainer_cpus,
            gpus=each * place.trainer_gpus,
            env={STOP_VARIABLE: str(math.ceil(place.stop_s)), **(ENV if place.nodes > 1 else {})},
            restarts=place.restarts,
        )
        for node, name in enumerate(names)
    ]


def list_servers(place: PlaceSection) -> list[str]:
    """The names of the servers. Example: server0, server1 for `place.servers=2`."""
    return [f"{SERVER}{number}" for number in range(place.servers)]


def _worker(role: str, run: str, *options: str) -> tuple[str, ...]:
    return PYTHON, "-m", "ludic.cli", "worker", role, run, *options


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
        # By its own error, raised here if None, which it would meet again: not if a launcher may
        # try again, nor after a stop or a kill.
        has_failed = status is None or (status not in (DONE, TRY_AGAIN) and status < SIGNALLED)
        if is_new and has_failed and not (directory.has_steps or directory.server_log.exists()):
            shutil.rmtree(directory.path, ignore_errors=True)  # as a run of one process that fails before its first step
    is_done = status == DONE and directory.summary.is_file()
    return status, directory.summary.read_text(encoding="utf-8") if is_done else ""


def _run_processes(recipe: Any, folder: Path, console: Console) -> int:
    def note(text: str) -> None:
        console.print(text, markup=False)

    processes, section = plan_processes(recipe, folder), recipe.place
    has_queue = isinstance(recipe, Recipe) and uses_queue(recipe)
    if (lacking := describe_lacking_gpus(recipe, processes)) is not None:
        note(lacking)
    if section.on == "slurm":
        if has_queue:
            make_run_id(folder)
        script = write_job(section, processes, folder)
        note(f"Wrote {script}; submit it with `sbatch {os.path.relpath(script)}`")
        return DONE
    # One process of the plan starts all trainers of a machine.
    counts = {**Counter(process.role for process in processes), TRAINER: section.trainers}
    counted = ", ".join(f"{count} {role}{'s' * (count > 1)}" for role, count in counts.items())
    note(f"{folder}: {counted} on {section.on}")
    if has_queue:  # it is open before an actor looks at it; Ctrl-C ends a wait for its server
        asyncio.run(reopen_queue(recipe.queue, folder, StopRequest(note)))
    trainers = [process.name for process in processes if process.role == TRAINER]
    with closing(open_place(section, processes, folder)) as place, _shown_logs(folder, trainers, console) as show:

        def sleep(seconds: float) -> None:
            time.sleep(seconds)
            show()

        def note_end(text: str) -> None:  # the end of a trainer's log is shown already
            note(text.partition("\n")[0] if text.startswith(tuple(trainers)) else text)

        return Supervisor(
            place,
            processes,
            folder=folder,
            place_name=section.on,
            least=section.min_nodes if section.trainers > 1 else None,
            stop_grace_s=section.stop_s,
            note=note_end,
            sleep=sleep,
        ).run()


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
                    console.print(lines.decode("utf-8", errors="replace"), markup=False)
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
        return SlurmJob(
            name,
            section.nodes,
            cpus,
            gpus,
            time=section.slurm_time,
            notice_s=math.ceil(section.stop_s) + NOTICE_MARGIN_S,
            python=sys.executable,
            options=tuple(section.slurm_options),
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
