"""The processes of a run, from its recipe."""

from __future__ import annotations

from pathlib import Path

from ludic.launch.process import PYTHON, Process
from ludic.recipes.schema import Recipe

TRAINER, ACTOR = "trainer", "actor"
"""The roles; `ludic worker ROLE RUN` is what a process of a role executes."""


def plan_processes(recipe: Recipe, folder: Path) -> list[Process]:
    """The trainer and the actors of the run in `folder`, in the order in which they are started.

    Example: with `place.actors=2` the names are trainer, actor0, actor1.
    """
    run = str(folder.resolve())
    trainer = Process(TRAINER, TRAINER, _worker(TRAINER, run), restarts=recipe.place.restarts)
    names = [f"{ACTOR}{i}" for i in range(recipe.place.actors)]
    actors = [Process(name, ACTOR, _worker(ACTOR, run, "--name", name), restarts=recipe.place.restarts) for name in names]
    return [trainer, *actors]


def _worker(role: str, run: str, *options: str) -> tuple[str, ...]:
    return PYTHON, "-m", "ludic.cli", "worker", role, run, *options
