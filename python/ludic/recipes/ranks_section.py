"""The settings of a run on several ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Optional

from ludic.errors import ConfigError


@dataclass
class RanksSection:
    """Waits of several ranks for each other, in seconds. With one process none of them is used."""

    timeout_s: float = 600.0
    """How long a rank waits in an exchange of tensors for the slowest one."""
    rendezvous_timeout_s: float = 600.0
    """How long the ranks wait for each other at the start."""
    port: Optional[int] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """Port at which ranks meet under Slurm; null: one that follows from the job's id. With
    `place.nodes`, that of torchrun's agents; null: 29400."""
    step_s: float = 3600.0
    """Longest time of a step without the phases below. A rank that exceeds this or one of the
    following prints the stacks of all its threads and exits with 75."""
    generation_s: float = 7200.0
    """Longest time until a batch is sampled."""
    save_s: float = 3600.0
    """Longest time of a checkpoint."""
    load_s: float = 3600.0
    """Longest time of loading a checkpoint."""
    publish_s: float = 3600.0
    """Longest time of sending weights to servers."""
    evaluation_s: float = 7200.0
    """Longest time of a held-out measurement."""


def phase_deadlines(section: RanksSection) -> dict[str, float]:
    """The deadline of each phase of the watchdog, in seconds."""
    return {
        "step": section.step_s,
        "generation": section.generation_s,
        "save": section.save_s,
        "load": section.load_s,
        "publish": section.publish_s,
        "evaluation": section.evaluation_s,
    }


def check_ranks(section: RanksSection) -> None:
    """Raise `ConfigError` for a time that is not positive, or for an impossible port."""
    times = asdict(section)
    port = times.pop("port")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"ranks.port ({port}) must be from 1 to 65535")
    for name, value in times.items():
        if not value > 0:
            raise ConfigError(f"ranks.{name} ({value}) must be > 0 seconds")
