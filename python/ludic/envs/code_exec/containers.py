"""What sandboxes in containers have in common, whichever program makes the containers.

A container's main process is `ludic.envs.code_exec.in_sandbox`, attached to this process by its
stdin and stdout. So it costs one start, programs cost a fork, and it ends by itself when this
process ends, because its stdin does. It needs an image with a Python, and no file of this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import re
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.bubblewrap import PLACES
from ludic.envs.code_exec.in_sandbox.watch import MOST_PROCESSES
from ludic.envs.code_exec.pool import BaseSandboxPool
from ludic.envs.code_exec.process_sandbox import first_process
from ludic.envs.code_exec.seccomp import seccomp_filter
from ludic.errors import ConfigError, GradingError

logger = logging.getLogger(__name__)

UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
OWN_MEMORY_MB = 128
"""Of the processes that run and watch a program."""
MOST_TASKS = MOST_PROCESSES + 16
"""Processes and threads of a container. A program with more than MOST_PROCESSES is stopped."""
FILES_AND_PROCESSES = {"nofile": 1024, "nproc": 256}
"""Limits of a container's processes."""
USERS = range(20_000, 60_000)
"""Each container has a user of its own, because the kernel counts the processes of a user in all
containers."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
HIDDEN = "/dev/mqueue"
"""Where files could be made, outside of the places that are cleaned."""
START_S = 120.0
"""For the start of a container, on a machine that may be busy."""
PULL_S = 1800.0
OWNER = "ludic.sandbox.owner"
"""Label of a container, whose value is `this_process()`."""
END_S = 60.0


class Users:
    """Draws the users of a pool's containers: all of USERS, in order from one at random, before any
    comes again."""

    def __init__(self) -> None:
        self._places = itertools.count(random.SystemRandom().randrange(len(USERS)))

    def draw(self) -> int:
        return USERS[next(self._places) % len(USERS)]


class ContainerPlan:
    """How one container is made."""

    def __init__(
        self, prefix: str, memory_limit: str, working_dir: str, network_disabled: bool, users: Users | None = None
    ) -> None:
        """It has a name of its own that begins with `prefix`, and the next of `users`, or any user.
        `memory_limit` is a program's."""
        if not working_dir.startswith("/") or working_dir in ("/", "/tmp", "/dev/shm"):
            raise ConfigError(f"working_dir ({working_dir!r}) must be a folder of its own in the container, such as '/workspace'")
        self.name = f"{prefix}-{uuid.uuid4().hex[:12]}"
        self.memory_mb, self.working_dir, self.network_disabled = megabytes_of(memory_limit), working_dir, network_disabled
        self.user = (users or Users()).draw()

    @property
    def places(self) -> dict[str, int]:
        """Where programs can write, and how many megabytes."""
        return {
            self.working_dir: PLACES["/workspace"],
            **{place: size for place, size in PLACES.items() if place != "/workspace"},
        }

    @property
    def total_memory_mb(self) -> int:
        """The limit of the container: of a program, of its files, and of what watches it."""
        return self.memory_mb + sum(self.places.values()) + OWN_MEMORY_MB

    @property
    def command(self) -> list[str]:
        """`python3` of the image, whichever that is, and its arguments."""
        system_call_filter = seccomp_filter(network=not self.network_disabled)
        return first_process("python3", list(self.places), system_call_filter=system_call_filter)


def megabytes_of(size: str) -> int:
    """Of a size such as "256m" or "1g". ConfigError for any other text, and below a megabyte."""
    found = re.fullmatch(r"(\d+)([bkmg]?)b?", size.strip().lower())
    megabytes = int(found[1]) * UNITS[found[2]] >> 20 if found else 0
    if megabytes < 1:
        raise ConfigError(f"memory_limit ({size!r}) must be a number with b, k, m or g, of at least 1m, such as '256m'")
    return megabytes


def this_process() -> str:
    """A name of this process that no other one has, on this or another machine, until it starts
    again."""
    return f"{_machine()} {os.getpid()} {_start_of(os.getpid())}"


def has_ended(process: str) -> bool:
    """Whether the process of this name has ended; False if that is not known: it is of another
    machine or user, or processes are hidden from this one."""
    machine, _, rest = process.partition(" ")
    pid, _, start = rest.partition(" ")
    if machine != _machine() or not pid.isdigit():
        return False
    try:
        _start_of(1)  # with `hidepid`, others' processes look as if they had ended
    except OSError:
        return False
    try:
        return _start_of(int(pid)) != start
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def _machine() -> str:
    """Of processes of one user that see each other's numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


def _start_of(pid: int) -> str:
    """When a process started, in ticks since the machine did. OSError if it cannot be seen."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]


class Remover(ABC):
    """Removes containers, and keeps the names of those that it could not remove. For any number of
    threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: set[str] = set()

    @abstractmethod
    def _list_owners(self) -> Mapping[str, str]:
        """The name of each container with the label OWNER, in any state, and the label's value.
        GradingError if they cannot be listed."""

    @abstractmethod
    def _remove(self, container: str) -> None:
        """Kill and remove a container, which may be gone already, and return when it is gone.
        GradingError if it is not in time."""

    @property
    def failed(self) -> frozenset[str]:
        """The containers that could not be removed, and may still be there."""
        with self._lock:
            return frozenset(self._failed)

    def remove(self, container: str) -> None:
        """Kill and remove a container. GradingError if that fails; it is then tried again with the
        next `remove_leftovers`."""
        with self._lock:
            self._failed.add(container)
        self._remove(container)
        with self._lock:
            self._failed.discard(container)

    def remove_leftovers(self) -> None:
        """Remove the containers that could not be removed before, and containers of processes that
        have ended: one that is killed between the creation and the start of a container leaves it.
        What cannot be removed now is logged. GradingError if the containers cannot be listed."""
        before, owners = self.failed, self._list_owners()
        with self._lock:
            self._failed -= before - owners.keys()  # gone by themselves
        for container, owner in owners.items():
            if container in before or has_ended(owner):
                try:
                    self.remove(container)
                except GradingError as error:
                    logger.warning("%s", error)


class ContainerPool(BaseSandboxPool):
    """A pool of containers. What a process that was killed has left is removed before they
    start."""

    def __init__(self, version: str, remover: Remover, *settings: Any) -> None:
        """`settings` are arguments of `BaseSandboxPool`."""
        super().__init__(*settings)
        self._version, self._remover, self._users = version, remover, Users()

    @property
    def python_version(self) -> str:
        """Of the containers, or of the image as far as is known before they start."""
        return self._version

    @abstractmethod
    def _fetch_image(self) -> None:
        """Pull the image unless it is there. GradingError if that fails."""

    async def start(self) -> None:
        """Start all containers, or none. The image is fetched first if it is not there."""
        await asyncio.to_thread(self._remover.remove_leftovers)
        await asyncio.to_thread(self._fetch_image)
        await super().start()

    async def shutdown(self) -> None:
        await super().shutdown()
        if self._remover.failed:
            await asyncio.to_thread(self._remover.remove_leftovers)
