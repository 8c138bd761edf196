"""Workspaces in containers, by the command line of Docker or Podman."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from uuid import uuid4

from ludic.envs.code_exec.containers import OWNER, PULL_S, START_S, this_process
from ludic.envs.code_exec.podman_sandbox import ContainerRemover
from ludic.envs.workspaces import relay
from ludic.envs.workspaces.workspace import KEPT_BYTES, RELAY, SOCKET_FOLDER, Ended, Workspace, relayed, run_program
from ludic.errors import RolloutError

ULIMITS = {"fsize": 1 << 30, "nofile": 4096, "nproc": 4096}
LIMITS = ["--memory", "4g", "--pids-limit", "512", *(f"--ulimit={name}={most}:{most}" for name, most in ULIMITS.items())]
"""Of a container, unless its arguments say otherwise."""
WAIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
"""The first process of a container, in the Python of its image. Orphans become its children."""


class ContainerWorkspace(Workspace):
    """A container of `image`, without a network and without capabilities. What a command installs
    is there for the next one; the processes of an earlier one are not.

    `program` is `docker` or `podman`; its daemon must run on this machine, since folders are
    mounted. The image needs a `python3`. `mounts` are shown at their own paths, to read alone;
    `arguments` are further ones of `docker create`.
    """

    def __init__(self, program: str, image: str, *, mounts: Sequence[str] = (), arguments: Sequence[str] = ()) -> None:
        super().__init__()
        self._program, self._image, self._arguments = str(shutil.which(program)), image, arguments
        self._shown = {path: path for path in mounts}
        self._name = f"ludic-agent-{uuid4().hex[:12]}"
        self._has_run = False

    @property
    def variables(self) -> dict[str, str]:
        return {"LANG": "C.UTF-8"}  # the image has the others

    async def start(self, files: Path | None, texts: Mapping[str, str]) -> None:
        await asyncio.to_thread(_remover, self._program)
        await super().start(files, texts)
        copied = self._base / "workspace"
        for path in (copied, *copied.rglob("*"), *(self._base / "run").iterdir()):
            if not path.is_symlink():  # the image says as which user its programs run
                path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))
        shown = {str(self._base / "run"): SOCKET_FOLDER, os.path.abspath(relay.__file__): RELAY, **self._shown}
        volumes = [part for source, target in shown.items() for part in ("--volume", f"{source}:{target}:ro")]
        options = ["--name", self._name, "--label", f"{OWNER}={this_process()}", "--network", "none", "--log-driver", "none"]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", *LIMITS, *volumes, *self._arguments]
        first = ["--entrypoint", "python3", self._image, "-I", "-S", "-c", WAIT]
        await self._ask("create", *options, *first, timeout_s=PULL_S)
        await self._ask("cp", f"{copied}/.", f"{self._name}:{self.folder}")
        await self._ask("start", self._name)

    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        await self._end_processes()
        self._has_run = True
        return await self._exec(*relayed("python3", argv), variables=variables)

    async def put(self, source: Path, name: str) -> str:
        await self._end_processes()
        await self._ask("cp", f"{source}/.", f"{self._name}:/{name}")
        return f"/{name}"

    async def get(self, name: str) -> str | None:
        ended = await self._exec("head", "-c", str(KEPT_BYTES), "--", name)
        return None if ended.code else ended.stdout

    async def stop(self) -> None:
        try:
            await asyncio.to_thread(_remover(self._program).remove, self._name)
        finally:
            await super().stop()

    async def _end_processes(self) -> None:
        if self._has_run:
            await self._ask("restart", "-t", "0", self._name)
        self._has_run = False

    async def _exec(self, *argv: str, variables: Mapping[str, str] | None = None) -> Ended:
        told = json.dumps(variables or {}).encode()
        return await run_program([self._program, "exec", "--interactive", "--workdir", self.folder, self._name, *argv], told=told)

    async def _ask(self, *arguments: str, timeout_s: float = START_S) -> None:
        """Run a command of the program. Raises RolloutError if it fails."""
        async with asyncio.timeout(timeout_s):
            ended = await run_program([self._program, *arguments])
        if ended.code:
            said = ended.stderr.strip()[-500:] + ("; the image needs a python3" if "python3" in ended.stderr else "")
            raise RolloutError(f"`{Path(self._program).name} {arguments[0]}` of {self._image} failed: {said}")


@cache
def _remover(program: str) -> ContainerRemover:
    """What removes the containers of a program. Those of processes that have ended are removed at
    once."""
    remover = ContainerRemover(program)
    remover.remove_leftovers()
    return remover
