"""Agents that are commands: a place for each episode, a folder and, in a sandbox, no network but
the gateway's socket."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.bubblewrap import NOBODY, find_python, is_bubblewrap_available, list_system_mounts
from ludic.envs.code_exec.seccomp import seccomp_filter
from ludic.errors import ConfigError, RolloutError, check_value
from ludic.inference.gateway.session import Session
from ludic.interaction import relay
from ludic.launch import guard

KEPT_BYTES = 2**20
"""Of each stream of a command, the last bytes are kept."""
SHOWN = 2000
"""Characters of its errors in messages."""
PORT = 8000
"""Of the gateway in a sandbox."""
STOP_S = 30.0
_SOCKET, _RELAY, _FOLDER = "/run/ludic.sock", "/run/relay.py", "/workspace"


class AgentExitError(RolloutError):
    """A command that ended with an error; it has what it wrote as `output`."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Place:
    """Where an episode is played."""

    folder: Path | None = None
    socket: Path | None = None


@dataclass(frozen=True)
class AgentCommand:
    """A command that is an agent. Called with a session, it runs the command to its end and
    returns its answer.

    `argv` may have `{prompt}`, `{prompt_file}`, `{workspace}`, `{base_url}`, `{api_key}`,
    `{model}` and `{row.COLUMN}`; a brace that is meant is doubled. There is no shell. The variables
    of `Session.environment` are set, and no other but `PATH`, `HOME`, `LANG` and those of `env` and
    `secrets`, which are names of variables of this process.

    `sandbox="bubblewrap"`: the command sees `/usr`, its folder, and the gateway of its own episode
    at 127.0.0.1, without any other network, file or process. `"none"` runs it as this user, with
    everything that this user may do. All processes of a command end with it.
    """

    argv: Sequence[str]
    output: str = "stdout"
    """`stdout`, `last_message` (the text of the last call), or `file:NAME` in the folder."""
    sandbox: str = "auto"
    files: str | None = None
    """A folder that is copied into that of each episode."""
    mounts: Sequence[str] = ()
    """Folders that a sandbox shows at the same path, to read alone, such as a virtual environment
    and the interpreter that it was made from."""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.argv or not isinstance(self.argv, list | tuple) or not all(isinstance(part, str) for part in self.argv):
            raise ConfigError(f"agent.command ({self.argv!r}) must be a list of texts, such as [python3, agent.py, '{{prompt}}']")
        check_value("agent.sandbox", self.sandbox, choices=("auto", "bubblewrap", "none"))
        if self.output not in ("stdout", "last_message") and not self.output.startswith("file:"):
            raise ConfigError(f"agent.output ({self.output}) must be stdout, last_message or file:NAME")
        if self.files is not None and not Path(self.files).is_dir():
            raise ConfigError(f"agent.files ({self.files}) is no folder; name one that is copied for each episode")
        if missing := [name for name in self.secrets if name not in os.environ]:
            raise ConfigError(f"agent.secrets ({missing[0]}) is no variable of this process; set it, or leave it out")
        if self.sandbox != "none" and not is_bubblewrap_available():
            raise ConfigError(
                f"agent.sandbox ({self.sandbox}) needs bubblewrap, and it is not installed or may not be used here; install it, or set "
                "agent.sandbox=none to run the command without a sandbox"
            )
        for part in self.argv:
            fill(part, {}, check=True)
        for name, value in self.env.items():
            fill(value, {}, check=True, setting=f"agent.env.{name}")
        if absent := [path for path in self.mounts if not Path(path).is_absolute() or not Path(path).exists()]:
            raise ConfigError(f"agent.mounts ({absent[0]}) must be an absolute path that exists")
        if self.sandbox == "none" and shutil.which(self.argv[0]) is None and "{" not in self.argv[0]:
            raise ConfigError(f"agent.command ({self.argv[0]}) is no program on PATH; give its path")

    @property
    def is_contained(self) -> bool:
        return self.sandbox != "none"

    @contextmanager
    def open_place(self) -> Iterator[Place]:
        """A new folder with a copy of `files`, which is deleted with all that is in it."""
        base = Path(tempfile.mkdtemp(prefix="ludic-agent-"))
        try:
            folder = base / "workspace"
            shutil.copytree(self.files, folder, symlinks=True) if self.files else folder.mkdir()
            if self.is_contained and os.geteuid() == 0:
                base.chmod(0o711)
                for path in (folder, *folder.rglob("*")):
                    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
            yield Place(folder, base / "gateway.sock" if self.is_contained else None)
        finally:
            # Python 3.11 removes folders by recursion, which a deep one exceeds.
            for command in (["chmod", "-R", "u+rwX", str(base)], ["rm", "-rf", "--", str(base)]):
                subprocess.run(command, check=False, capture_output=True, timeout=STOP_S)

    async def __call__(self, session: Session) -> str | None:
        """Run the command. Raises AgentExitError if it ends with an error."""
        place = Path(str(session.workspace))
        seen = Path(_FOLDER) if self.is_contained else place
        base_url = f"http://127.0.0.1:{PORT}/v1" if self.is_contained else session.base_url
        (place / ".prompt").write_text(session.prompt, encoding="utf-8")
        values: dict[str, Any] = {
            "prompt": session.prompt,
            "prompt_file": str(seen / ".prompt"),
            "workspace": str(seen),
            "base_url": base_url,
            "api_key": session.api_key,
            "model": session.model,
            **{f"row.{name}": value for name, value in session.row.items()},
        }
        argv = [fill(part, values) for part in self.argv]
        own = {name: os.environ[name] for name in self.secrets}
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin" if self.is_contained else os.environ.get("PATH", ""),
            "HOME": str(seen),
            "LANG": "C.UTF-8",
            **session.environment(base_url),
            **{name: fill(value, values, setting=f"agent.env.{name}") for name, value in self.env.items()},
            **own,
        }
        code, stdout, stderr = await (self._run_contained if self.is_contained else self._run)(argv, variables, place)
        output = self._read_output(stdout, place)
        if code != 0:
            shown = stderr[-SHOWN:].strip() or stdout[-SHOWN:].strip()
            raise AgentExitError(f"{argv[0]} ended with status {code}: {shown}", output or "")
        return output

    def _read_output(self, stdout: str, place: Path) -> str | None:
        if self.output == "stdout":
            return stdout.strip()
        if self.output == "last_message":
            return None
        path = place / self.output.removeprefix("file:")
        try:
            if not path.resolve().is_relative_to(place.resolve()) or not path.is_file():
                return ""
            with path.open("rb") as file:
                return file.read(KEPT_BYTES).decode("utf-8", errors="replace").strip()
        except OSError:
            return ""

    async def _run(self, argv: Sequence[str], variables: Mapping[str, str], place: Path) -> tuple[int, str, str]:
        """Run a command under a guard, which ends all its processes with it, or with this one."""
        link, other = socket.socketpair()
        command = [sys.executable, "-I", "-S", os.path.abspath(guard.__file__), str(os.getpid()), *argv]
        with link, other:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(variables),
                cwd=place,
                stdin=other.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            other.close()
            code, stdout, stderr = await _wait(process, link.close)
            link.setblocking(False)
            with suppress(OSError, ValueError):
                report = json.loads(link.recv(4096))  # of the guard, about the start of the command
                stderr += f"{argv[0]} cannot be started: {report['error']}" if "error" in report else ""
        return code, stdout, stderr

    async def _run_contained(self, argv: Sequence[str], variables: Mapping[str, str], place: Path) -> tuple[int, str, str]:
        """Run a command in a sandbox of bubblewrap, whose processes end with its first."""
        python = find_python(None, others=os.geteuid() == 0)
        arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
        arguments += [
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--hostname",
            "sandbox",
            *list_system_mounts(python),
        ]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--size", str(64 << 20), "--tmpfs", "/tmp", "--dir", "/run"]
        arguments += ["--bind", str(place), _FOLDER, "--bind", str(place.parent / "gateway.sock"), _SOCKET]
        for path in self.mounts:
            arguments += ["--ro-bind", path, path]
        arguments += ["--ro-bind", os.path.abspath(relay.__file__), _RELAY, "--remount-ro", "/", "--chdir", _FOLDER, "--clearenv"]
        for name, value in variables.items():
            arguments += ["--setenv", name, value]
        # Arguments of a process can be read by every user: keys are in a file without a name.
        told, filtered = (_unnamed_file(content) for content in ("\0".join(arguments).encode(), seccomp_filter(network=True)))
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        try:
            process = await asyncio.create_subprocess_exec(
                str(shutil.which("bwrap")),
                *(
                    "--seccomp",
                    str(filtered),
                    "--args",
                    str(told),
                    "--",
                    str(python),
                    "-I",
                    "-S",
                    _RELAY,
                    _SOCKET,
                    str(PORT),
                    *argv,
                ),
                env={},
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=(told, filtered),
                **user,
            )
        finally:
            os.close(told)
            os.close(filtered)
        return await _wait(process, process.kill)


def _unnamed_file(content: bytes) -> int:
    """The number of an open file with this content, to be read from its beginning."""
    number = os.memfd_create("ludic", 0)
    with os.fdopen(os.dup(number), "wb") as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    return number


async def _wait(process: asyncio.subprocess.Process, kill: Any) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a process when it has ended. It is killed if the caller is
    cancelled."""
    assert process.stdout is not None
    assert process.stderr is not None
    streams = [asyncio.ensure_future(_read_tail(stream)) for stream in (process.stdout, process.stderr)]
    try:
        code = await process.wait()
        stdout, stderr = await asyncio.gather(*streams)
        return code, stdout, stderr
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        for stream in streams:
            stream.cancel()


async def _read_tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while data := await stream.read(2**16):
        kept = (kept + data)[-KEPT_BYTES:]
    return kept.decode("utf-8", errors="replace")


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
        if name not in _NAMES and not name.startswith("row."):
            raise ConfigError(f"{setting} has {{{name}}}; it may have {', '.join(_NAMES)} and row.COLUMN, or {{{{ for a brace")
        if check:
            return ""
        if name not in values:
            columns = ", ".join(each.removeprefix("row.") for each in values if each.startswith("row."))
            raise ConfigError(f"{setting} has {{{name}}}, and the row has no such column; it has {columns}")
        return str(values[name])

    return _PLACE.sub(replace, text)
