"""What the launcher of several processes says to each of them: its rank, how many there are, and
where they meet. Read from the environment of torchrun, or of Slurm's srun. Without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ludic.errors import ConfigError, check_value

LOWEST_PORT, NUM_PORTS = 12_000, 16_000
"""Ports that are derived from the id of a Slurm job. All are below the range that systems give to
outgoing connections."""

OF_RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "SLURM_PROCID", "SLURM_LOCALID"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that make a process a rank."""
STATUS_FOLDER = "LUDIC_RANK_STATUS_FOLDER"
"""Variable with the folder in which a rank tells its agent the status that it ends with, in a file
with the number of the rank as its name."""


@dataclass(frozen=True)
class RankEnvironment:
    """One process of several that train one model.

    Example: `torchrun --nproc-per-node 2` starts `RankEnvironment(0, 2, 0, "127.0.0.1", 29500)` and
    `RankEnvironment(1, 2, 1, "127.0.0.1", 29500)`, both with `has_store`.
    """

    rank: int
    world_size: int
    local_rank: int
    """Its number on this machine, which is also the number of its GPU."""
    address: str
    """Host of the store at which the ranks meet."""
    port: int
    has_store: bool = False
    """Whether the launcher serves the store. Otherwise rank 0 does."""
    attempt: str = "0"
    """How often the agent of torchrun has started its ranks again after an error. Each agent counts
    for itself, and not when machines come or go."""
    num_machines: int = 1
    """On how many machines torchrun has started ranks."""
    run_id: str = ""
    """torchrun's name of the run. Empty under other launchers, which do not start ranks again."""


STOP_ONCE = "LUDIC_STOP_ONCE"
"""Set to 1 where a request to stop may arrive as several SIGTERM: Slurm sends it to every process
of a step, and an agent passes its own on to its ranks."""


def read_rank_environment(environ: Mapping[str, str] = os.environ, *, port: int | None = None) -> RankEnvironment | None:
    """The environment of torchrun if it is set, else srun's; None if there is one process. `port`:
    of the store under Slurm, instead of one that follows from the job.

    Variables of a Slurm job alone do not count: a batch script, in which `srun` was not called, is
    one process. Raises ConfigError for variables that are incomplete or contradict each other.
    """
    is_torchrun = "RANK" in environ and "WORLD_SIZE" in environ
    if not is_torchrun and not ("SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ):
        return None
    world_size = _read_number(environ, "WORLD_SIZE" if is_torchrun else "SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return None
    environment = _read_torchrun(environ, world_size) if is_torchrun else _read_slurm(environ, world_size, port)
    check_value("the rank in the environment", environment.rank, "ranks count from 0", least=0, below=environment.world_size)
    return environment


def _read_torchrun(environ: Mapping[str, str], world_size: int) -> RankEnvironment:
    return RankEnvironment(
        rank=_read_number(environ, "RANK"),
        world_size=world_size,
        local_rank=_read_number(environ, "LOCAL_RANK", 0),
        address=_read(environ, "MASTER_ADDR"),
        port=_read_number(environ, "MASTER_PORT"),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        num_machines=_read_number(environ, "GROUP_WORLD_SIZE", 1),
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
    )


def _read_slurm(environ: Mapping[str, str], world_size: int, port: int | None) -> RankEnvironment:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if "MASTER_ADDR" not in environ and not nodes:
        raise ConfigError("SLURM_STEP_NODELIST and MASTER_ADDR are not set; set MASTER_ADDR to the host of rank 0")
    job, step = (_read_number(environ, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    derived = LOWEST_PORT + (16 * job + step) % NUM_PORTS
    return RankEnvironment(
        rank=_read_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_read_number(environ, "SLURM_LOCALID", 0),
        address=environ.get("MASTER_ADDR") or first_host(nodes),
        port=_read_number(environ, "MASTER_PORT", derived) if port is None else port,
    )


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that a rank starts, and that is no rank: a server, an actor.

    >>> without_rank({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "HOME": "/root"})
    {'HOME': '/root'}
    """
    dropped = (*OF_RANKS, STATUS_FOLDER)
    return {name: value for name, value in environ.items() if name not in dropped and not name.startswith("TORCHELASTIC_")}


def tell_status(code: int, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the agent of this rank the status with which the rank ends, if the agent asks for it: an
    agent that ends its ranks learns no other way how they did."""
    folder, rank = environ.get(STATUS_FOLDER), environ.get("RANK", "")
    if folder and rank.isdecimal():
        with suppress(OSError):
            Path(folder, rank).write_text(str(code), encoding="utf-8")


def first_host(nodes: str) -> str:
    """The first host of Slurm's compact list.

    >>> first_host("gpu[07-09,12],cpu1")
    'gpu07'
    >>> first_host("login1,login2")
    'login1'
    """
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return nodes if entry is None else re.sub(r"\[([^],-]+)[^]]*\]", r"\1", entry.group())


def _read(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(f"the environment has RANK and WORLD_SIZE but no {name}; start the ranks with torchrun, or set it")
    return environ[name]


def _read_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = str(default) if default is not None and name not in environ else _read(environ, name)
    if not text.isdecimal():
        raise ConfigError(f"the environment has {name}={text}, which is not a number")
    return int(text)
