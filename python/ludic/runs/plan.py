"""The processes of a run, from its recipe."""

from __future__ import annotations

import math
from pathlib import Path

from ludic.launch.local import LOOPBACK
from ludic.launch.process import PYTHON, Process
from ludic.launch.torchrun import ENV, PORT, STOP_VARIABLE, torchrun_argv
from ludic.recipes.epochs_schema import EpochsRecipe
from ludic.recipes.processes import PlaceSection, is_on_one_machine
from ludic.recipes.schema import Recipe

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
    trainers = _plan_trainers(recipe, run)
    if not isinstance(place, PlaceSection):
        return trainers
    return [*trainers, *_plan_servers(place, run), *_plan_actors(place, run)]


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


def _plan_servers(place: PlaceSection, run: str) -> list[Process]:
    """On one machine servers listen to it alone, elsewhere at the address of their machine."""
    return [
        Process(
            name,
            SERVER,
            _worker(SERVER, run, "--name", name, "--host", LOOPBACK if is_on_one_machine(place) else f"{{host:{name}}}"),
            place.server_cpus,
            place.server_gpus,
            restarts=place.restarts,
        )
        for name in list_servers(place)
    ]


def _plan_actors(place: PlaceSection, run: str) -> list[Process]:
    names = [f"{ACTOR}{number}" for number in range(place.actors)]
    return [
        Process(name, ACTOR, _worker(ACTOR, run, "--name", name), place.actor_cpus, place.actor_gpus, restarts=place.restarts)
        for name in names
    ]


def _worker(role: str, run: str, *options: str) -> tuple[str, ...]:
    return PYTHON, "-m", "ludic.cli", "worker", role, run, *options
