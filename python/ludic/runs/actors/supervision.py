"""The actors and servers of a run, started and watched from a thread of the trainer's process.

The trainer's process is the one that the user started: its terminal, signals and exit status are
the same as in a run without actors.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ludic.errors import LaunchError
from ludic.launch.local import LocalPlace, find_gpus
from ludic.launch.process import DONE, Ended, Place, Process, Started
from ludic.launch.state import SILENT_S, read_launch
from ludic.launch.supervisor import OTHERS_GRACE_S, Supervisor
from ludic.recipes.actors import uses_queue
from ludic.recipes.schema import Recipe
from ludic.runs.actors.queue import reopen_queue
from ludic.runs.launching import ACTOR, SERVER, TRAINER, plan_processes
from ludic.runs.stop_request import StopRequest
from ludic.training import ranks

logger = logging.getLogger(__name__)

JOIN_S = OTHERS_GRACE_S + 30.0
"""How long to wait until all actors have ended."""


class WithOwnTrainer(Place):
    """A place whose trainer is this process, which runs already and which the place does not
    end."""

    def __init__(self, inner: Place) -> None:
        self._inner = inner
        self._own: queue.SimpleQueue[Started | Ended] = queue.SimpleQueue()
        self._began = time.monotonic()
        self.is_finished = False
        """Whether the trainer has ended."""
        self.alive: set[str] = set()
        """The actors that run."""
        self.starts = 0
        """How many actors were started, restarts included."""
        self._uncounted: set[str] = set()

    def start(self, process: Process) -> None:
        if process.role == TRAINER:
            self._own.put(Started(process.name, os.getpid(), socket.gethostname(), "its terminal"))
        else:
            if process.role == SERVER:
                self._uncounted.add(process.name)
            self._inner.start(process)

    def finish(self, status: int) -> None:
        """Report that the trainer has ended. May be called from another thread."""
        self.is_finished = True
        self._own.put(Ended(TRAINER, status, None, time.monotonic() - self._began, ""))

    def poll(self) -> list[Started | Ended]:
        own = [self._own.get() for _ in range(self._own.qsize())]
        news = self._inner.poll()
        for report in (report for report in news if report.name not in self._uncounted):
            if isinstance(report, Started):
                self.alive.add(report.name)
                self.starts += 1
            else:
                self.alive.discard(report.name)
        return [*own, *news]

    def ask(self, name: str, number: int = signal.SIGTERM) -> None:
        if name != TRAINER:
            self._inner.ask(name, number)

    def stop(self, names: Sequence[str], grace_s: float) -> list[Ended]:
        return self._inner.stop([name for name in names if name != TRAINER], grace_s)

    def close(self, grace_s: float = 0.0) -> list[Ended]:
        return self._inner.close(grace_s)


class ActorProcesses:
    """The actors of a run while they are supervised. `count` returns how many run, and how many
    restarts there were, or None if that is not known."""

    def __init__(self, count: Callable[[], tuple[int, int] | None]) -> None:
        self._count = count
        self._restarts: int | None = None
        self.measure()  # restarts are counted from here
        self.lost: asyncio.Future[LaunchError] = asyncio.get_running_loop().create_future()
        """Done when no process of a role is left that may be restarted, if this process restarts
        them."""

    def why_lost(self) -> str | None:
        """Why no actor or no server is left; None while there may be one."""
        return str(self.lost.result()) if self.lost.done() else None

    def measure(self) -> dict[str, float]:
        """How many run, and how many were restarted since the last call; nothing if it is not
        known."""
        counted = self._count()
        if counted is None:
            return {}
        alive, restarts = counted
        new = 0 if self._restarts is None else restarts - self._restarts
        self._restarts = restarts
        return {"actors/alive": float(alive), "actors/restarts": float(new)}


def count_placed(folder: Path, *, now: Callable[[], float] = time.time) -> tuple[int, int] | None:
    """How many actors run, and how many restarts there were, as the launcher of the run writes it
    to its folder. None if none does: Slurm and Kubernetes do not, and one may have ended."""
    launch = read_launch(folder)
    if launch is None or launch.exit_status is not None or now() - launch.beat > SILENT_S:
        return None
    actors = [process for process in launch.processes if process.role == ACTOR]
    return sum(actor.state == "running" for actor in actors), sum(actor.restarts for actor in actors)


@asynccontextmanager
async def run_actors(
    recipe: Recipe, folder: Path, note: Callable[[str], None], stop: StopRequest, *, is_placed: bool = False
) -> AsyncIterator[ActorProcesses | None]:
    """Open the queue of the run, start its actors and servers, restart those that fail, and end all
    at exit. All ranks call it, and rank 0 does it. Yields None if there are none to start.
    `is_placed`: a launcher has done all of this."""
    if is_placed:
        yield ActorProcesses(lambda: count_placed(folder)) if recipe.place.actors and ranks.rank() == 0 else None
        return
    if uses_queue(recipe):
        await reopen_queue(recipe.queue, folder, stop)
    if recipe.place.actors + recipe.place.servers == 0 or ranks.rank() > 0:
        yield None
        return
    taken = math.ceil(recipe.place.trainer_gpus)  # by this process, which sees all
    place = WithOwnTrainer(LocalPlace(folder, gpus=find_gpus(os.environ)[taken:]) if taken else LocalPlace(folder))
    supervisor = Supervisor(
        place, plan_processes(recipe, folder), folder=folder, note=lambda text: None if place.is_finished else note(text)
    )
    actors = ActorProcesses(lambda: (len(place.alive), max(0, place.starts - recipe.place.actors)))
    loop = asyncio.get_running_loop()

    def report(error: LaunchError) -> None:
        if not actors.lost.done():
            actors.lost.set_result(error)

    def supervise() -> None:
        try:
            supervisor.run()
            launch = read_launch(folder)
            given_up = [process.role for process in launch.processes if process.state == "given_up"] if launch is not None else []
            role = given_up[-1] if given_up else ACTOR
            error = LaunchError(f"every {role} has failed more often than place.restarts allows; see {folder / 'workers'}")
        except LaunchError as raised:
            error = raised
        except Exception as raised:
            logger.exception("the supervisor of the actors failed")
            error = LaunchError(f"the supervisor of the actors failed with {type(raised).__name__}: {raised}; resume the run")
        if not place.is_finished:
            loop.call_soon_threadsafe(report, error)

    thread = threading.Thread(target=supervise, name="supervisor of the actors", daemon=True)
    thread.start()
    status = 128 + signal.SIGTERM  # of a trainer that was stopped or failed
    try:
        yield actors
        status = DONE
    finally:
        place.finish(status)
        await asyncio.to_thread(thread.join, JOIN_S)
