"""Agents that are commands: what they are given, their answer, and how their work is verified."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.backend import is_program_ready
from ludic.envs.code_exec.bubblewrap import is_bubblewrap_available
from ludic.envs.workspaces.containers import ContainerWorkspace
from ludic.envs.workspaces.workspace import PORT, BubblewrapWorkspace, Ended, FolderWorkspace, Workspace
from ludic.errors import ConfigError, RolloutError, check_value
from ludic.inference.gateway.session import Session

SHOWN = 2000
"""Characters of a command's errors in messages."""
SANDBOXES = ("auto", "bubblewrap", "docker", "podman", "task", "none")
PROMPT_FILE = ".prompt"
CANNOT_RUN = 126
"""The least status of a command that a shell could not run, or that a signal ended."""


class AgentExitError(RolloutError):
    """A command that ended with an error; it has what it wrote as `output`."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class AgentCommand:
    """A command that is an agent: it is run to its end in a workspace of its own.

    `argv` may have `{prompt}`, `{prompt_file}`, `{workspace}`, `{base_url}`, `{api_key}`,
    `{model}` and `{row.COLUMN}`; a brace that is meant is doubled. There is no shell. The variables
    of `Session.environment` are set, and no other but those of the workspace (`PATH`, `HOME`,
    `LANG`) and those of `env` and `secrets`, which are names of variables of this process.

    `sandbox`: `bubblewrap`, `docker` and `podman` show it its folder, the gateway of its own
    episode at 127.0.0.1, and of other files `/usr` or those of `image`. `none` runs it as this
    user, with everything that this user may do. `task` is the one of a terminal task, which judges
    it. `auto` is bubblewrap, and with an image Docker or Podman. All processes of a command end
    with it.
    """

    argv: Sequence[str]
    output: str = "stdout"
    """`stdout`, `last_message` (the text of the last call), or `file:NAME` in the folder."""
    sandbox: str = "auto"
    image: str | None = None
    """Of a container; it may have `{row.COLUMN}`."""
    container_args: Sequence[str] = ()
    """Further arguments of `docker create` or `podman create`."""
    files: str | None = None
    """A folder that is copied into that of each episode."""
    mounts: Sequence[str] = ()
    """Folders that a sandbox shows at the same path, to read alone, such as a virtual environment
    and the interpreter that it was made from."""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    verify: Sequence[str] | None = None
    """A command that is run in the folder when all processes of the agent have ended; what it
    writes is `verified` for reward functions. It may also have `{tests}`. It runs programs of the
    sandbox, which in a container the agent may have replaced."""
    tests: str | None = None
    """A folder that only `verify` sees, as `{tests}`."""

    def __post_init__(self) -> None:
        for name, argv in (("command", self.argv), ("verify", ["true"] if self.verify is None else self.verify)):
            if not argv or not isinstance(argv, list | tuple) or not all(isinstance(part, str) for part in argv):
                raise ConfigError(f"agent.{name} ({argv!r}) must be a list of texts, such as [python3, agent.py, '{{prompt}}']")
            for part in argv:
                fill(part, {}, check=True, setting=f"agent.{name}")
        for name, value in {"image": self.image or "", **{f"env.{name}": value for name, value in self.env.items()}}.items():
            fill(value, {}, check=True, setting=f"agent.{name}")
        check_value("agent.sandbox", self.sandbox, choices=SANDBOXES)
        if self.output not in ("stdout", "last_message") and not self.output.startswith("file:"):
            raise ConfigError(f"agent.output ({self.output}) must be stdout, last_message or file:NAME")
        for name in ("files", "tests"):
            if (path := getattr(self, name)) is not None and not Path(path).is_dir():
                raise ConfigError(f"agent.{name} ({path}) is no folder; name one that is copied for each episode")
        if missing := [name for name in self.secrets if name not in os.environ]:
            raise ConfigError(f"agent.secrets ({missing[0]}) is no variable of this process; set it, or leave it out")
        if absent := [path for path in self.mounts if not Path(path).is_absolute() or not Path(path).exists()]:
            raise ConfigError(f"agent.mounts ({absent[0]}) must be an absolute path that exists")
        self._check_sandbox()

    def _check_sandbox(self) -> None:
        chosen = self.chosen_sandbox
        if (self.image is None) == (chosen in ("docker", "podman")):
            raise ConfigError(
                f"agent.sandbox ({self.sandbox}) and agent.image ({self.image}) belong together: docker or podman needs one"
            )
        if chosen == "none" and self.mounts:
            raise ConfigError("agent.mounts are of a sandbox, and agent.sandbox is none; leave one out")
        if chosen == "task":
            if found := [name for name in ("mounts", "files", "verify", "tests") if getattr(self, name)]:
                raise ConfigError(
                    f"agent.{found[0]} has no effect in a task's own sandbox; leave it out (task.args.mounts shows folders there)"
                )
            return
        if chosen == "none":
            self._check_program()
        elif not (is_bubblewrap_available() if chosen == "bubblewrap" else is_program_ready(chosen)):
            raise ConfigError(
                f"agent.sandbox ({self.sandbox}) needs {chosen}, and it is not installed or may not be used here; install it, or set "
                "agent.sandbox=none, without an image, to run the command without a sandbox"
            )

    def _check_program(self) -> None:
        if shutil.which(self.argv[0]) is None and "{" not in self.argv[0]:
            raise ConfigError(f"agent.command ({self.argv[0]}) is no program on PATH; give its path")

    @property
    def chosen_sandbox(self) -> str:
        """What `auto` means here."""
        if self.sandbox != "auto" or self.image is None:
            return self.sandbox.replace("auto", "bubblewrap")
        return "podman" if shutil.which("docker") is None else "docker"

    @asynccontextmanager
    async def open_workspace(self, row: Mapping[str, Any]) -> AsyncIterator[Workspace]:
        """A workspace that has not started; it is deleted with all that is in it."""
        workspace: Workspace
        if self.image is not None:
            image = fill(self.image, _columns(row), setting="agent.image")
            workspace = ContainerWorkspace(self.chosen_sandbox, image, mounts=self.mounts, arguments=self.container_args)
        else:
            workspace = FolderWorkspace() if self.chosen_sandbox == "none" else BubblewrapWorkspace(self.mounts)
        try:
            yield workspace
        finally:
            await workspace.stop()

    async def start(self, session: Session) -> None:
        """Start the session's workspace, with the files and the prompt."""
        await session.workspace.start(None if self.files is None else Path(self.files), {PROMPT_FILE: session.prompt})

    async def __call__(self, session: Session) -> str | None:
        """Run the command. Raises AgentExitError if it ends with an error."""
        ended = await self._run(self.argv, session, {}, "agent.command")
        output: str | None = ended.stdout.strip()
        if self.output != "stdout":
            name = self.output.removeprefix("file:")
            output = None if self.output == "last_message" else (await session.workspace.get(name) or "").strip()
        if ended.code:
            shown = ended.stderr[-SHOWN:].strip() or ended.stdout[-SHOWN:].strip()
            raise AgentExitError(f"{self.argv[0]} ended with status {ended.code}: {shown}", output or "")
        return output

    async def run_verify(self, session: Session) -> str:
        """Run `verify`. Returns what it wrote; RolloutError if that is nothing, or if it could not
        be run or was killed."""
        tests = {} if self.tests is None else {"tests": await session.workspace.put(Path(self.tests), "tests")}
        ended = await self._run(self.verify or (), session, tests, "agent.verify")
        if not ended.stdout.strip() or not 0 <= ended.code < CANNOT_RUN:
            wrote = f"wrote {ended.stdout.strip()[-SHOWN:]!r} and ended with status {ended.code}"
            raise RolloutError(f"agent.verify {wrote}: {ended.stderr[-SHOWN:].strip()}")
        return ended.stdout.strip()

    async def _run(self, argv: Sequence[str], session: Session, more: Mapping[str, str], setting: str) -> Ended:
        values = {**self._values(session), **more}
        return await session.workspace.exec(
            [fill(part, values, setting=setting) for part in argv], self._variables(session, values)
        )

    def _values(self, session: Session) -> dict[str, Any]:
        """The placeholders."""
        workspace: Workspace = session.workspace
        return {
            "prompt": session.prompt,
            **({} if self.sandbox == "task" else {"prompt_file": f"{workspace.folder}/{PROMPT_FILE}"}),
            "workspace": workspace.folder,
            "base_url": f"http://127.0.0.1:{PORT}/v1" if workspace.is_contained else session.base_url,
            "api_key": session.api_key,
            "model": session.model,
            **_columns(session.row),
        }

    def _variables(self, session: Session, values: Mapping[str, Any]) -> dict[str, str]:
        return {
            **session.workspace.variables,
            **session.environment(values["base_url"]),
            **{name: fill(value, values, setting=f"agent.env.{name}") for name, value in self.env.items()},
            **{name: os.environ[name] for name in self.secrets},
        }


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {f"row.{name}": value for name, value in row.items()}


_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_NAMES = ("prompt", "prompt_file", "workspace", "base_url", "api_key", "model")


def fill(text: str, values: Mapping[str, Any], *, check: bool = False, setting: str = "agent.command") -> str:
    """The text with its placeholders filled in; `{{` is a brace. Raises ConfigError for one that is
    not known, and for a column that the row does not have. `check` looks at names alone.

    >>> fill("{prompt} {{x}}", {"prompt": "2+2="})
    '2+2= {x}'
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        known = {"agent.image": (), "agent.verify": (*_NAMES, "tests")}.get(setting, _NAMES)
        if name not in known and not name.startswith("row."):
            raise ConfigError(f"{setting} has {{{name}}}; it may have {', '.join((*known, 'row.COLUMN'))}, or {{{{ for a brace")
        if check:
            return ""
        if name not in values:
            columns = ", ".join(each.removeprefix("row.") for each in values if each.startswith("row."))
            raise ConfigError(f"{setting} has {{{name}}}, and the row has no such column; it has {columns}")
        return str(values[name])

    return _PLACE.sub(replace, text)
