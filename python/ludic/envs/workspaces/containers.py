"""Workspaces in containers, by the command line of Docker or Podman."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

from ludic.envs.code_exec.containers import OWNER, PULL_S, START_S, this_process
from ludic.envs.code_exec.podman_sandbox import ContainerRemover
from ludic.envs.workspaces.workspace import RELAY, RUN, Ended, Workspace, read_file, run_program, tell, text_of_file
from ludic.errors import GradingError, RolloutError
from ludic.event_loop import run_to_completion

logger = logging.getLogger(__name__)

ULIMITS = {"fsize": 1 << 30, "nofile": 4096, "nproc": 4096}
LIMITS = ["--memory", "4g", "--pids-limit", "512", *(f"--ulimit={name}={most}:{most}" for name, most in ULIMITS.items())]
"""Of a container, unless its arguments say otherwise."""


class ContainerWorkspace(Workspace):
    """A container of `image`, without capabilities, and without a network unless `network` names
    one. What a command installs is there for the next one; the processes of an earlier one are not.

    `program` is `docker` or `podman`; its daemon must run on this machine, since folders are
    mounted. `mounts` are shown at their own paths, to read alone; `arguments` are further ones of
    `docker create`.
    """

    def __init__(
        self, program: str, image: str, *, mounts: Sequence[str] = (), arguments: Sequence[str] = (), network: str = "none"
    ) -> None:
        super().__init__()
        self._network = network
        self._program, self._image, self._mounts, self._arguments = str(shutil.which(program)), image, mounts, arguments
        self._name = f"ludic-agent-{uuid4().hex[:12]}"
        self._has_run = False

    @property
    def variables(self) -> dict[str, str]:
        return {"LANG": "C.UTF-8"}  # the image has the others

    async def start(self, files: Path | None = None, texts: Mapping[str, str] = MappingProxyType({})) -> None:
        await run_to_completion(asyncio.to_thread(_remover, self._program))
        await super().start(files, texts)
        await self._have_image()
        volumes = [(str(self._run), RUN), *((path, path) for path in self._mounts)]
        shown = [part for source, target in volumes for part in ("--volume", f"{source}:{target}:ro")]
        options = [
            "--name",
            self._name,
            "--label",
            f"{OWNER}={this_process()}",
            "--network",
            self._network,
            "--log-driver",
            "none",
        ]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
        for command in (  # the relay alone is a first process, which reaps orphans and waits
            ["create", *options, *LIMITS, *shown, *self._arguments, "--entrypoint", RELAY[0], "--", self._image],
            ["cp", f"{self._files}/.", f"{self._name}:{self.folder}"],
            ["start", self._name],
        ):
            await run_to_completion(self._ask(*command))  # what is cancelled half-way cannot be removed

    async def _have_image(self) -> None:
        async with asyncio.timeout(START_S):
            known = await run_program([self._program, "image", "inspect", "--", self._image])
        if known.code:
            await self._ask("pull", "--", self._image, timeout_s=PULL_S)

    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        await self._end_processes()
        self._has_run = True
        if self.socket is not None and self.socket.exists():
            self.socket.chmod(0o666)  # the image says as which user its programs run
        return await self._exec(*RELAY, *argv, told=tell(variables))

    async def put(self, source: Path, name: str) -> str:
        await self._end_processes()
        if not name.startswith("/"):
            return await super().put(source, name)
        await self._exec("rm", "-rf", "--", name)
        await run_to_completion(self._ask("cp", f"{source}/.", f"{self._name}:{name}"))
        return name

    async def get(self, name: str) -> str | None:
        return text_of_file(await self._exec(*read_file(name)))

    async def stop(self) -> None:
        try:
            await run_to_completion(asyncio.to_thread(_remover(self._program).remove, self._name))
        except GradingError as error:
            logger.warning("%s", error)
        finally:
            await super().stop()

    def _copy(self, source: Path | None, copied: Path, texts: Mapping[str, str]) -> None:
        """Every user may read the copy, since the image says which one its programs are; and write,
        where it is copied once more."""
        super()._copy(source, copied, texts)
        for path in (copied, *copied.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))

    async def _end_processes(self) -> None:
        if self._has_run:
            await run_to_completion(self._ask("restart", "-t", "0", self._name))
        self._has_run = False

    async def _exec(self, *argv: str, told: bytes = b"") -> Ended:
        return await run_program([self._program, "exec", "--interactive", "--workdir", self.folder, self._name, *argv], told=told)

    async def _ask(self, *arguments: str, timeout_s: float = START_S) -> None:
        """Run a command of the program. Raises RolloutError if it fails."""
        async with asyncio.timeout(timeout_s):
            ended = await run_program([self._program, *arguments])
        if ended.code:
            said = f"`{Path(self._program).name} {arguments[0]}` of {self._image} failed: {ended.stderr.strip()[-500:]}"
            raise RolloutError(said)


@cache
def _remover(program: str) -> ContainerRemover:
    """Removes the containers of a program; at once, the ones whose process has ended."""
    remover = ContainerRemover(program)
    remover.remove_leftovers()
    return remover
