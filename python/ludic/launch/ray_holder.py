"""The part of `RayPlace` that runs on the machines of a cluster: an actor that holds one child
process."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ludic.errors import LaunchError
from ludic.launch.local import LocalPlace
from ludic.launch.process import Ended, Process

MODE, TOKEN = "RAY_AUTH_MODE", "token"
WATCH_S = 0.05


def installed_versions() -> dict[str, str]:
    """The versions that all machines of a run must have in common."""
    try:
        own = version("ludic")
    except PackageNotFoundError:
        own = "not installed"
    return {"ludic": own, "Python": ".".join(platform.python_version_tuple()[:2])}


class Holder:
    """Holds the child process of one `Process`, and ends it when this actor ends, however that is.

    Only names, arguments, variables and what became of the process cross Ray.
    """

    def __init__(self, folder: str, cwd: str) -> None:
        if os.path.isdir(cwd):
            os.chdir(cwd)  # for recipes that name code of the current folder
        run = Path(folder)
        if not run.is_dir():  # not on a shared file system: logs stay on this machine
            run = Path(tempfile.gettempdir()) / f"ludic-{os.getuid()}" / run.name
        self._place = LocalPlace(run, gpus=[])  # Ray shows this actor its GPUs, and the child inherits that
        self._name, self._raylet = "", os.getppid()
        self._ended: Ended | None = None

    async def describe(self) -> dict[str, Any]:
        """This machine."""
        import ray.util

        return {
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "versions": installed_versions(),
            "token": os.environ.get(MODE) == TOKEN,  # set by `ray start` where it demands a token
        }

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
        """Start the process. Returns its `pid` and `log`, or the `error`."""
        self._name, self._ended = name, None
        try:
            self._place.start(Process(name, "held", tuple(argv), env=dict(env)))
        except LaunchError as error:
            return {"error": str(error)}
        started = self._place.poll()[0]
        if isinstance(started, Ended):
            raise AssertionError("a start is reported first")
        return {"pid": started.pid, "host": started.host, "log": started.log}

    async def wait(self) -> dict[str, Any]:
        """How the process ended, once it has."""
        while self._ended is None:
            if os.getppid() != self._raylet:
                self._end_without_raylet()
            self._ended = next((report for report in self._place.poll() if isinstance(report, Ended)), None)
            await asyncio.sleep(0 if self._ended else WATCH_S)
        return vars(self._ended)

    def _end_without_raylet(self) -> None:
        """End this actor's process with Ray's own process of the machine. Ray does so too, but not
        in a container whose first process leaves the dead uncollected, where it sees no end."""
        self._place.close()
        os._exit(1)

    async def ask(self, number: int) -> None:
        self._place.ask(self._name, number)

    async def stop(self, grace_s: float) -> dict[str, Any]:
        """End the process as `Place.stop` does. Returns how it ended."""
        if grace_s > 0:
            self._place.ask(self._name)
        waiting = asyncio.ensure_future(self.wait())
        done, _ = await asyncio.wait([waiting], timeout=grace_s)
        if not done:
            self._ended = self._ended or next(iter(self._place.stop([self._name], 0.0)), None)
            self._ended = self._ended or Ended(self._name, None, None, 0.0, "it did not run")
        return await waiting
