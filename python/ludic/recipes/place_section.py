"""The settings of the processes of a run: how many there are, where they run, and who restarts
them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from ludic.errors import ConfigError

PLACES = ("local", "ray", "slurm")


@dataclass
class TrainersSection:
    """The processes of a run. By default there is one."""

    on: str = "local"
    """Where processes run. `local`: this machine. `ray`: a Ray cluster. `slurm`: a job, for which a
    script is written and not submitted. `place=ray` is short for `place.on=ray`."""
    address: Optional[str] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """The Ray cluster: auto, the one that this machine belongs to; local, one on this machine for
    this run alone; or HOST:PORT. Null: auto."""
    insecure: bool = False
    """Use a Ray cluster that demands no token: whoever reaches it can run code on its machines."""
    trainers: int = 1
    """Processes (ranks) that train one model together, over all machines. `ranks=2` is short for
    `place.trainers=2`."""
    nodes: int = 1
    """Machines of the trainers, which are divided evenly among them; with `on=slurm`, machines of
    the whole job."""
    min_nodes: Optional[int] = None  # noqa: UP045
    """Machines with which trainers go on if others are lost. Null: all are needed."""
    restarts: int = 3
    """How often a process that fails is started again in ten minutes; one failure more ends the
    run, which can be resumed."""
    stop_s: float = 120.0
    """Seconds that trainers have to finish their step and save when they are asked to stop, before
    they are killed. A Slurm job asks them this and a minute before its time limit."""
    trainer_cpus: float = 1
    """Cores that Ray or Slurm reserves for each trainer."""
    trainer_gpus: float = 0
    """GPUs of each trainer. On this machine 0 means all of them, shared by all processes."""
    slurm_time: str = "24:00:00"
    """Time limit of a Slurm job. Shortly before it the run is saved, and the job queued again."""
    slurm_options: list[str] = field(default_factory=list)
    """More options of sbatch, such as ['--partition=gpu','--account=lab']."""


@dataclass
class PlaceSection(TrainersSection):
    """The processes of a run. By default there is one, which samples and trains."""

    actors: int = 0
    """Actors: processes that sample for the trainer, each with a model of its own. 0: none; with
    `queue.url`, actors that are started by hand are waited for."""
    actor_cpus: float = 1
    """Cores that Ray or Slurm reserves for each actor."""
    actor_gpus: float = 0
    """GPUs of each actor; less than 1 shares one."""
    servers: int = 0
    """Inference servers that are started for the run, and from which trainer and actors sample. 0:
    none; `inference.url` names servers that run already."""
    server_cpus: float = 1
    """Cores that Ray or Slurm reserves for each server."""
    server_gpus: float = 0
    """GPUs of each server; less than 1 shares one."""


SHORT_FORMS = {"ranks": "place.trainers", **{name: f"place.{name}" for name in ("trainers", "actors", "servers")}}
"""Settings that have a short name on the command line. A mapping is the section of this name."""


def parse_place(value: Any) -> dict[str, Any]:
    """The settings that `place=VALUE` stands for: `ray`, or `ray://HOST:PORT`."""
    text = str(value)
    return {"on": "ray", "address": text} if text.startswith("ray://") else {"on": text}


def needs_launcher(place: TrainersSection) -> bool:
    """Whether the command of the user only starts and watches the processes of the run. Otherwise
    it trains itself, and starts actors beside it."""
    return place.on != "local" or place.trainers > 1


def is_on_one_machine(section: TrainersSection) -> bool:
    """Whether all processes of the run are on this machine."""
    return section.on == "local" or (section.on == "ray" and section.address == "local")


def check_place(section: TrainersSection) -> None:
    """Raise `ConfigError` for numbers that make no sense, and for settings without effect."""
    _check_numbers(section)
    if section.on not in PLACES:
        raise ConfigError(f"place.on ({section.on}) must be {', '.join(PLACES[:-1])} or {PLACES[-1]}")
    if section.on != "ray" and (section.address is not None or section.insecure):
        setting = f"insecure ({section.insecure})" if section.address is None else f"address ({section.address})"
        raise ConfigError(f"place.{setting} is of a Ray cluster; set place.on=ray too, or leave it out")
    if section.on == "local" and section.nodes > 1:
        raise ConfigError(
            f"place.nodes ({section.nodes}) is more than this machine; set place.on=ray or place.on=slurm, or start the ranks on each "
            "machine with torchrun"
        )
    if section.trainers % section.nodes:
        raise ConfigError(
            f"place.trainers ({section.trainers}) must be divided evenly among place.nodes ({section.nodes}); change one of them"
        )
    if section.min_nodes is not None and not 1 <= section.min_nodes <= section.nodes:
        raise ConfigError(f"place.min_nodes ({section.min_nodes}) must be from 1 to place.nodes ({section.nodes})")
    if section.on != "slurm" and section.slurm_options:
        raise ConfigError("place.slurm_options has no effect without place.on=slurm; set it too, or leave the options out")


def _check_numbers(section: TrainersSection) -> None:
    values = asdict(section)
    for name in ("trainers", "nodes"):
        if values[name] < 1:
            raise ConfigError(f"place.{name} ({values[name]}) must be >= 1")
    if not values["stop_s"] >= 1:
        raise ConfigError(f"place.stop_s ({values['stop_s']:g}) must be at least 1, the seconds in which trainers save")
    least_0 = ("restarts", "actors", "servers", *(name for name in values if re.search("_[cg]pus$", name)))
    for name in least_0:
        if values.get(name, 0) < 0:
            raise ConfigError(f"place.{name} ({values[name]}) must be >= 0")
        if name.endswith("_gpus") and values.get(name, 0) > 1 and values[name] != int(values[name]):
            raise ConfigError(f"place.{name} ({values[name]}) must be a whole number, or less than 1 to share a GPU")
