"""A process of a run, and what a place reports of it."""

from __future__ import annotations

import re
import signal as signals
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludic.errors import TRY_AGAIN, ConfigError, check_value

PYTHON = "python"
"""As the first argument of a command: the interpreter that ludic runs in, on the machine where the
process starts."""
DONE = 0
"""The exit status of a process that has finished its work."""
USAGE = 2
"""The exit status of a wrong command line or setting, which a restart does not change."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOST = re.compile(r"\{host:([A-Za-z0-9_.-]+)\}")


@dataclass(frozen=True)
class Process:
    """A command line with the resources that it needs.

    >>> Process("actor0", "actor", ("python", "-m", "ludic.cli", "worker", "actor", "RUN"), cpus=2)
    """

    name: str
    """Unique in the run; also the name of the log file. Letters, digits, `_`, `.` and `-`."""
    role: str
    """What it does: trainer, actor, server."""
    argv: tuple[str, ...]
    """The command. `PYTHON` as its first argument is the interpreter; `{host:NAME}` in an argument
    is the address of the machine of the process NAME."""
    cpus: float = 1
    """Cores to reserve on Ray and Slurm. On this machine nothing is reserved."""
    gpus: float = 0
    """GPUs to reserve; a fraction shares one."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the variables of the place."""
    restarts: int = 3
    """How often it may be restarted within the supervisor's window."""

    def __post_init__(self) -> None:
        check_name("name of a process", self.name)
        check_name("role of a process", self.role)
        if not self.argv or not all(isinstance(part, str) and "\0" not in part for part in self.argv):
            raise ConfigError(f"the command of {self.name} ({self.argv!r}) must be one or more texts without null characters")
        for name in ("cpus", "gpus", "restarts"):
            check_value(f"{name} of {self.name}", getattr(self, name), least=0)
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ConfigError(f"gpus ({self.gpus}) of {self.name} must be a whole number, or less than 1 to share one")
        if bad := [key for key, value in self.env.items() if not VARIABLE.fullmatch(key) or "\0" in value]:
            raise ConfigError(f"environment of {self.name}: {', '.join(map(repr, bad))} must be of letters, digits and `_`")

    @property
    def is_trainer(self) -> bool:
        """Whether the run is over with it."""
        return self.role == "trainer"

    def named_hosts(self) -> set[str]:
        """The processes whose machines the command names."""
        return {name for part in self.argv for name in HOST.findall(part)}

    def resolve(self, python: str, hosts: Mapping[str, str]) -> tuple[str, ...]:
        """The command with the interpreter `python` and with `hosts` (process -> address) filled
        in. With hosts {"a": "10.0.0.1"}, `--to={host:a}:80` becomes `--to=10.0.0.1:80`."""
        first = python if self.argv[0] == PYTHON else self.argv[0]
        return tuple(HOST.sub(lambda found: hosts[found[1]], part) for part in (first, *self.argv[1:]))


def check_name(label: str, text: str) -> None:
    """Raise ConfigError for text that is no name of a process or a job."""
    if not _NAME.fullmatch(text):
        raise ConfigError(f"{label} ({text!r}) must consist of letters, digits, `_`, `.` and `-`")


def check_processes(processes: list[Process]) -> None:
    """Raise ConfigError for a name that two processes have, and for the host of a process that does
    not exist."""
    names = [process.name for process in processes]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two processes have the name {repeated[0]}; give each a name of its own")
    for process in processes:
        if unknown := sorted(process.named_hosts() - set(names)):
            raise ConfigError(f"{process.name} names the host of {unknown[0]}, which is not one of {', '.join(names)}")


@dataclass(frozen=True)
class Started:
    """A process runs."""

    name: str
    pid: int
    """Its process id on its machine."""
    host: str
    """The name or address of its machine."""
    log: str
    """The file on that machine to which it writes."""


@dataclass(frozen=True)
class Ended:
    """A process has ended, together with every process that it started.

    Without `code` and `signal` it is lost: its machine or what held it there is gone.
    """

    name: str
    code: int | None
    """Its exit status; None if a signal ended it."""
    signal: int | None
    """The signal that ended it."""
    seconds: float
    """How long it ran."""
    tail: str
    """The last lines of its log; of a lost process, how it was lost."""

    @property
    def status(self) -> int:
        """The exit status as a shell reports it: 128 plus the number of a signal. `TRY_AGAIN`
        for a lost process."""
        if self.code is not None:
            return self.code
        return TRY_AGAIN if self.signal is None else 128 + self.signal

    def describe(self) -> str:
        """Example: `actor0 was ended by SIGKILL after 12.1 s`."""
        how = f"ended with status {self.code}" if self.code is not None else "was lost"
        if self.signal is not None:
            known = {number.value: number.name for number in signals.Signals}
            how = f"was ended by {known.get(self.signal, f'signal {self.signal}')}"
        return f"{self.name} {how} after {self.seconds:.1f} s"


class Place(ABC):
    """Runs processes. A process ends with the place, even if the place's own process is killed."""

    @abstractmethod
    def start(self, process: Process) -> None:
        """Start a process that does not run. `poll` reports when it has started, or `Ended` if it
        cannot be placed. Raises LaunchError if it cannot be started at all."""

    @abstractmethod
    def poll(self) -> list[Started | Ended]:
        """What has happened since the last call, in order, each event once. Does not wait."""

    @abstractmethod
    def ask(self, name: str, number: int = signals.SIGTERM) -> None:
        """Send the signal to a process, which may end, and do not wait. Does nothing if it does not
        run."""

    @abstractmethod
    def stop(self, names: Sequence[str], grace_s: float) -> list[Ended]:
        """End processes: SIGTERM, and SIGKILL for them and all that they started after `grace_s`
        seconds, or immediately if that is 0. Names that do not run are left out."""

    @abstractmethod
    def close(self, grace_s: float = 0.0) -> list[Ended]:
        """End all processes, within the same `grace_s` seconds, and free the place. A second call
        does nothing."""
