"""The place that a recipe names, for the processes of its run: this machine, a Ray cluster, or the
script of a Slurm job."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError
from ludic.files.atomic import write_text
from ludic.launch.local import LocalPlace
from ludic.launch.process import Place, Process
from ludic.launch.ray import RayPlace
from ludic.launch.slurm import SlurmJob, assign_nodes, write_script
from ludic.recipes.processes import TrainersSection, choose_kind
from ludic.recipes.schema import AUTO, Recipe
from ludic.runs.plan import ACTOR

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
