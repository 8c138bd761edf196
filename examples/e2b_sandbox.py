"""Terminal tasks in the sandboxes of a cloud provider, E2B.

    pip install e2b && export E2B_API_KEY=...
    ludic eval data=tasks/ model=DIRECTORY task.args.sandbox=e2b_sandbox:E2BSandbox

A sandbox is made from the template `docker_image` of the task, or from E2B's own.
"""

import asyncio
import io
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2b import AsyncSandbox, CommandExitException

from ludic.envs.harbor import HarborTask
from ludic.envs.workspaces.workspace import Ended

LIFETIME_S = 3600
"""E2B ends a sandbox by itself after this time, also if this process is killed."""
COMMAND_S = 3600.0
"""The caller has a deadline of its own for each command."""
STOP_S = 30.0
END_OTHERS = "kill -9 -1 2>/dev/null; true"
"""Ends all that earlier commands left: all processes of their user but this shell."""


class E2BSandbox:
    """A `ludic.envs.workspaces.sandbox.Sandbox`."""

    def __init__(self, task: HarborTask) -> None:
        self._task, self._made = task, None

    async def start(self) -> None:
        self._made = await AsyncSandbox.create(
            self._task.image, timeout=LIFETIME_S, envs=dict(self._task.env), allow_internet_access=self._task.allows_network
        )
        await self._run("mkdir -p /logs && chmod 777 /logs", user="root")

    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        await self._run(END_OTHERS)
        return await self._run(shlex.join(argv), dict(variables))

    async def put(self, source: Path, name: str) -> str:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source, ".")
        await self._made.files.write("/tmp/put.tar", packed.getvalue())
        place = shlex.quote(name)
        script = f"rm -rf {place} && mkdir -p {place} && tar -xf /tmp/put.tar -C {place} --no-same-owner && chmod -R a+rX {place}"
        ended = await self._run(script, user="root")
        if ended.code:
            raise OSError(f"{source} could not be copied to {name}: {ended.stderr}")
        return name

    async def stop(self) -> None:
        if self._made is not None:
            async with asyncio.timeout(STOP_S):
                await self._made.kill()

    async def _run(self, command: str, variables: dict[str, str] | None = None, user: str = "user") -> Ended:
        try:
            done = await self._made.commands.run(
                command, envs=variables or {}, cwd=self._task.workdir, timeout=COMMAND_S, user=user
            )
        except CommandExitException as error:  # another status than 0; all other exceptions lose the episode
            done = error
        return Ended(done.exit_code, done.stdout, done.stderr)
