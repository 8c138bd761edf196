"""A place for the programs of one episode, and the two without an image: a folder of this machine,
and the same in a sandbox of bubblewrap."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ludic.envs.code_exec.bubblewrap import NOBODY, as_nobody, find_python, isolate
from ludic.envs.code_exec.seccomp import seccomp_filter
from ludic.envs.workspaces import relay
from ludic.launch import guard

KEPT_BYTES = 2**20
"""Of each stream of a command, the last bytes are kept."""
PORT = 8000
"""Of the gateway in a sandbox."""
STOP_S = 30.0
"""For the end of processes and the removal of files."""
SOCKET_FOLDER, RELAY = "/run/ludic", "/run/relay.py"
SANDBOX_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


class Workspace(ABC):
    """A folder, and the programs that work in it, one after another.

    It is started once, and stopped once, which deletes it with all that programs left. A workspace
    that is contained has no network but `socket`, a file at which a server of this machine may
    listen before `start`; its programs find that at port `PORT` of 127.0.0.1.
    """

    is_contained = True
    folder = "/workspace"
    """As its programs see it."""

    def __init__(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="ludic-agent-"))
        (self._base / "run").mkdir()

    @property
    def socket(self) -> Path | None:
        return self._base / "run" / "gateway.sock" if self.is_contained else None

    @property
    def variables(self) -> dict[str, str]:
        """What its programs need to find others, and their home."""
        path = SANDBOX_PATH if self.is_contained else os.environ.get("PATH", "")
        return {"PATH": path, "HOME": self.folder, "LANG": "C.UTF-8"}

    async def start(self, files: Path | None, texts: Mapping[str, str]) -> None:
        """Make the folder, with a copy of `files`, and files of `texts` by their names."""
        copied = await asyncio.to_thread(self._copy, files, "workspace")
        for name, text in texts.items():
            (copied / name).write_text(text, encoding="utf-8")

    @abstractmethod
    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        """Run a command in the folder to its end. No process of an earlier one runs beside it. If
        the caller is cancelled, the command is killed. Of each stream the last `KEPT_BYTES` are
        returned."""

    @abstractmethod
    async def put(self, source: Path, name: str) -> str:
        """Show a copy of a folder of this machine to later commands, outside of the folder that
        they write to. Returns its path as they see it."""

    @abstractmethod
    async def get(self, name: str) -> str | None:
        """The text of a file of the folder, up to `KEPT_BYTES`. None if there is no such file, or
        if it is a link out of the folder."""

    async def stop(self) -> None:
        """End all programs, and delete everything."""
        await asyncio.to_thread(self._delete)

    def _copy(self, source: Path | None, name: str) -> Path:
        copied = self._base / name
        shutil.copytree(source, copied, symlinks=True) if source else copied.mkdir()
        return copied

    def _delete(self) -> None:
        # Python 3.11 removes folders by recursion, which a deep one exceeds.
        for command in (["chmod", "-R", "u+rwX", str(self._base)], ["rm", "-rf", "--", str(self._base)]):
            subprocess.run(command, check=False, capture_output=True, timeout=STOP_S)


class FolderWorkspace(Workspace):
    """A folder of this machine. **No sandbox**: its programs may do all that this user may."""

    is_contained = False

    def __init__(self) -> None:
        super().__init__()
        if not self.is_contained:
            self.folder = str(self._base / "workspace")

    async def put(self, source: Path, name: str) -> str:
        return str(await asyncio.to_thread(self._copy, source, name))

    async def get(self, name: str) -> str | None:
        place = (self._base / "workspace").resolve()
        path = place / name
        try:
            if not path.resolve().is_relative_to(place) or not path.is_file():
                return None
            with path.open("rb") as file:
                return file.read(KEPT_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return None

    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        """Runs it under a guard, which ends all its processes with it, or with this one."""
        link, other = socket.socketpair()
        command = [sys.executable, "-I", "-S", os.path.abspath(guard.__file__), str(os.getpid()), *argv]
        with link, other:
            process = await asyncio.create_subprocess_exec(
                *command, env=dict(variables), cwd=self.folder, stdin=other.fileno(), **_PIPES
            )
            other.close()
            ended = await wait_for(process, link.close)
            link.setblocking(False)
            with suppress(OSError, ValueError):
                report = json.loads(link.recv(4096))  # of the guard, about the start of the command
                if "error" in report:
                    return ended._replace(stderr=f"{ended.stderr}{argv[0]} cannot be started: {report['error']}")
        return ended


class BubblewrapWorkspace(FolderWorkspace):
    """A folder of this machine, and a new sandbox of bubblewrap for each command. It sees `/usr`,
    the folder, and `mounts` at their own paths, to read alone."""

    is_contained = True

    def __init__(self, mounts: Sequence[str] = ()) -> None:
        super().__init__()
        self._shown = {path: path for path in mounts}
        self._user = as_nobody()

    def _copy(self, source: Path | None, name: str) -> Path:
        copied = super()._copy(source, name)
        if self._user:
            self._base.chmod(0o711)
            for path in (copied, *copied.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        return copied

    async def put(self, source: Path, name: str) -> str:
        self._shown[await super().put(source, name)] = f"/{name}"
        return f"/{name}"

    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        python = find_python(None, others=bool(self._user))
        arguments = [*isolate(python), "--size", str(64 << 20), "--tmpfs", "/tmp"]
        arguments += ["--bind", str(self._base / "workspace"), self.folder]
        shown = {str(self._base / "run"): SOCKET_FOLDER, os.path.abspath(relay.__file__): RELAY, **self._shown}
        for source, target in shown.items():
            arguments += ["--ro-bind", source, target]
        arguments += ["--remount-ro", "/", "--chdir", self.folder, "--clearenv"]
        filtered = os.memfd_create("ludic", 0)
        try:
            os.pwrite(filtered, seccomp_filter(network=True), 0)
            command = [str(shutil.which("bwrap")), "--seccomp", str(filtered), *arguments, "--", *relayed(str(python), argv)]
            piped: dict[str, Any] = {**_PIPES, **self._user, "stdin": asyncio.subprocess.PIPE, "pass_fds": (filtered,)}
            process = await asyncio.create_subprocess_exec(*command, env={}, cwd="/", **piped)
        finally:
            os.close(filtered)
        return await wait_for(process, process.kill, json.dumps(variables).encode())


_PIPES: dict[str, Any] = {
    "stdout": asyncio.subprocess.PIPE,
    "stderr": asyncio.subprocess.PIPE,
    "start_new_session": True,
}


def relayed(python: str, argv: Sequence[str]) -> list[str]:
    """The command that serves the socket at `PORT` and runs `argv`; its input is the variables."""
    return [python, "-I", "-S", RELAY, f"{SOCKET_FOLDER}/gateway.sock", str(PORT), *argv]


async def run_program(argv: Sequence[str], *, told: bytes = b"") -> Ended:
    """Run a program of this machine to its end, with `told` as its input."""
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.PIPE, **_PIPES)
    return await wait_for(process, process.kill, told)


async def wait_for(process: asyncio.subprocess.Process, kill: Callable[[], object], told: bytes | None = None) -> Ended:
    """The end of a process, after it was given `told` as its input. It is killed if the caller is
    cancelled."""
    assert process.stdout is not None
    assert process.stderr is not None
    streams = [asyncio.ensure_future(_read_tail(stream)) for stream in (process.stdout, process.stderr)]
    try:
        if process.stdin is not None and told is not None:
            with suppress(ConnectionError):
                process.stdin.write(told)
                await process.stdin.drain()
            process.stdin.close()
        code = await process.wait()
        return Ended(code, *await asyncio.gather(*streams))
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
