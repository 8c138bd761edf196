"""Runs processes as children of this process, on this machine, and says which GPUs which of them
sees."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from ludic.errors import LaunchError, on_error
from ludic.launch import guard
from ludic.launch.process import Ended, Place, Process, Started
from ludic.launch.rank_environment import without_rank

LOOPBACK = "127.0.0.1"
START_S = 30.0
"""How long a guard may take to start its command."""
KILL_S = guard.KILL_DEADLINE_S + 5.0
POLL_S = 0.01


class LocalPlace(Place):
    """Child processes, each under a guard that ends it with all that it started: when it ends, when
    it is stopped, and when this process is gone, however that ended.

    Each writes to `FOLDER/workers/NAME.log`. `gpus` are lent to those that ask for some; the
    default is all that this process may use.
    """

    def __init__(self, folder: Path, *, gpus: Sequence[str] | None = None) -> None:
        self._folder = folder / "workers"
        self._gpus = GpuPool(find_gpus(os.environ) if gpus is None else gpus)
        self._running: dict[str, _Child] = {}
        self._news: list[Started | Ended] = []

    def start(self, process: Process) -> None:
        if process.name in self._running:
            raise LaunchError(f"{process.name} runs already; stop it first")
        variables = self._gpus.lend(process)
        hosts = dict.fromkeys(process.named_hosts(), LOOPBACK)
        with on_error(lambda: self._gpus.give_back(process.name)):
            child = _Child(replace(process, argv=process.resolve(sys.executable, hosts)), self._folder, variables)
        self._running[process.name] = child
        self._news.append(Started(process.name, child.pid, socket.gethostname(), str(child.log.path)))

    def poll(self) -> list[Started | Ended]:
        for name, child in list(self._running.items()):
            if (ended := child.poll()) is not None:
                self._forget(name)
                self._news.append(ended)
        news, self._news = self._news, []
        return news

    def ask(self, name: str, number: int = signal.SIGTERM) -> None:
        if name in self._running:
            self._running[name].send(number)

    def close(self, grace_s: float = 0.0) -> list[Ended]:
        return self.stop(list(self._running), grace_s)

    def stop(self, names: Sequence[str], grace_s: float) -> list[Ended]:
        children = {name: self._running[name] for name in names if name in self._running}
        if grace_s > 0:
            for child in children.values():
                child.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(child.poll() is None for child in children.values()):
            time.sleep(POLL_S)
        for child in children.values():
            child.kill()
        ended = []
        for name, child in children.items():
            ended.append(child.wait(KILL_S))
            self._forget(name)
        self._news = [news for news in self._news if news.name not in children]
        return ended

    def _forget(self, name: str) -> None:
        self._running.pop(name).kill()
        self._gpus.give_back(name)


class _Child:
    """A process under its guard."""

    def __init__(self, process: Process, folder: Path, variables: dict[str, str]) -> None:
        self.name, self.log = process.name, ProcessLog(folder, process.name)
        self._began = time.monotonic()
        self._ended: Ended | None = None
        self._link, other = socket.socketpair()
        command = [sys.executable, "-I", "-S", os.path.abspath(guard.__file__), str(os.getpid()), *process.argv]
        with on_error(self._link.close):
            with other, self.log.open() as log:
                self._guard = subprocess.Popen(
                    command,
                    env={**without_rank(os.environ), **variables, **process.env},
                    stdin=other.fileno(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            report = self._read_report()
            if "pid" not in report:
                self._guard.wait(KILL_S)
                raise LaunchError(f"{process.name} cannot be started: {report['error']}; correct the command")
        self.pid = int(report["pid"])

    def _read_report(self) -> dict[str, Any]:
        """What the guard says of the start of its command."""
        message, deadline = b"", time.monotonic() + START_S
        while not message.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._link], [], [], left)[0]:
                raise LaunchError(f"{self.name} was not started within {START_S:g} s; see {self.log.path}")
            if not (part := self._link.recv(4096)):
                raise LaunchError(f"{self.name} cannot be started: its guard failed; see {self.log.path}\n{self.log.tail()}")
            message += part
        return dict(json.loads(message))

    def poll(self) -> Ended | None:
        code = self._guard.poll()
        if code is not None and self._ended is None:
            seconds = time.monotonic() - self._began
            self._ended = Ended(
                self.name, code if code >= 0 else None, -code if code < 0 else None, seconds, tail=self.log.tail()
            )
        return self._ended

    def send(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._link.send(bytes([number]))

    def kill(self) -> None:
        """Make the guard kill what still runs of the process and of all that it started."""
        self._link.close()

    def wait(self, timeout_s: float) -> Ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        if self._guard.poll() is None:
            self._guard.kill()
            self._guard.wait()
        return self.poll() or Ended(self.name, None, signal.SIGKILL, time.monotonic() - self._began, "")


TAIL_LINES, TAIL_BYTES = 20, 4096
ROTATE_BYTES = 64 << 20
"""A log that is longer when its process starts again moves to NAME.log.1, whose content is lost."""


class ProcessLog:
    """`FOLDER/NAME.log`: all that a process wrote, one attempt after the other."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.log"
        self._begin = 0

    def open(self) -> BinaryIO:
        """The file to which the next attempt writes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > ROTATE_BYTES:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        file = self.path.open("ab")
        self._begin = file.tell()
        return file

    def tail(self) -> str:
        """The last lines of this attempt."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                begin = min(self._begin, end)  # the file may have been emptied
                file.seek(max(begin, end - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode("utf-8", errors="replace")
        except OSError as error:
            return f"({self.path}: {error.strerror})"
        return "\n".join(text.splitlines()[-TAIL_LINES:])


VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/proc/driver/nvidia/gpus")


def find_gpus(environment: Mapping[str, str], devices: Path = _DEVICES) -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them: those that it lists
    if it is set, else all that the driver has."""
    visible = environment.get(VISIBLE)
    if visible is not None:
        return [name for part in visible.split(",") if (name := part.strip()) and name != "-1"]
    return [str(number) for number in range(len(os.listdir(devices)))] if devices.is_dir() else []


class GpuPool:
    """Lends GPUs to processes. Whole numbers are GPUs of their own; a fraction shares one."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._free = dict.fromkeys(gpus, 1.0)
        self._lent: dict[str, tuple[list[str], float]] = {}

    def lend(self, process: Process) -> dict[str, str]:
        """The variables that show the process its GPUs; empty for a process that requested none.
        Raises LaunchError if too few are free."""
        if process.gpus == 0:
            return {}
        share = min(process.gpus, 1.0)
        fitting = sorted((free, gpu) for gpu, free in self._free.items() if free >= share - 1e-9)
        count = max(1, int(process.gpus))
        if len(fitting) < count:
            raise LaunchError(
                f"{process.name} needs {process.gpus:g} GPUs, and {len(fitting)} of {len(self._free)} have room; ask for fewer"
            )
        chosen = sorted((gpu for _, gpu in fitting[:count]), key=list(self._free).index)  # the fullest that fits
        for gpu in chosen:
            self._free[gpu] -= share
        self._lent[process.name] = chosen, share
        return {VISIBLE: ",".join(chosen)}

    def give_back(self, name: str) -> None:
        chosen, share = self._lent.pop(name, ([], 0.0))
        for gpu in chosen:
            self._free[gpu] = min(1.0, self._free[gpu] + share)
