"""A place for the programs of one episode, and the two without an image: a folder of this machine,
and the same in a sandbox of bubblewrap."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ludic import _core
from ludic.envs.code_exec.bubblewrap import NOBODY, as_nobody, find_python, isolate
from ludic.envs.code_exec.seccomp import seccomp_filter
from ludic.envs.workspaces.fork_server import ForkServer
from ludic.errors import ConfigError, RolloutError
from ludic.event_loop import run_to_completion
from ludic.launch import guard

logger = logging.getLogger(__name__)

KEPT_BYTES = 2**20
"""Of each stream of a command, the last bytes are kept."""
PORT = 8000
"""Of the gateway in a sandbox."""
STOP_S = 30.0
"""For the end of processes and the removal of files."""
RUN = "/run/ludic"
"""What a sandbox shows of the workspace to read alone: the gateway's socket, the relay, the
tests."""
RELAY = (f"{RUN}/relay", f"{RUN}/gateway.sock", str(PORT))
"""Before a command, serves the socket at `PORT` (crates/ludic-relay)."""
SANDBOX_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LIMITS = f"nproc=512 fsize={1 << 30}"
"""Of a sandbox of bubblewrap: processes and threads, bytes of a file."""
NO_FILE = 90
"""An exit status that programs and `docker exec` do not have."""
LONGEST_ANSWER = 2**26
"""Bytes, as JSON, of a forked process."""
LONGEST_SOCKET = 100
"""Characters of its path, a limit of the kernel."""


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

    def __init__(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="ludic-agent-"))
        self._files, self._run = self._base / "workspace", self._base / "run"
        self.folder = "/workspace" if self.is_contained else str(self._files)
        """As its programs see it."""
        self._run.mkdir()
        self._run.chmod(0o755)
        if self.is_contained:
            (self._run / "relay").write_bytes(_core.relay_program())
            (self._run / "relay").chmod(0o755)
            if len(str(self.socket)) > LONGEST_SOCKET:
                self._delete()
                raise ConfigError(f"the path {self.socket} is too long for a socket; set TMPDIR to a shorter folder")

    @property
    def socket(self) -> Path | None:
        return self._run / "gateway.sock" if self.is_contained else None

    @property
    def variables(self) -> dict[str, str]:
        """What its programs need to find others, and their home."""
        path = SANDBOX_PATH if self.is_contained else os.environ.get("PATH", "")
        return {"PATH": path, "HOME": self.folder, "LANG": "C.UTF-8"}

    async def start(self, files: Path | None, texts: Mapping[str, str]) -> None:
        """Make the folder, with a copy of `files`, and files of `texts` by their names."""
        await run_to_completion(asyncio.to_thread(self._copy, files, self._files, texts))

    @abstractmethod
    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        """Run a command in the folder to its end. No process of an earlier one runs beside it. If
        the caller is cancelled, the command is killed. Of each stream the last `KEPT_BYTES` are
        returned."""

    async def put(self, source: Path, name: str) -> str:
        """Show a copy of a folder of this machine to later commands, to read alone. Returns its
        path as they see it."""
        await run_to_completion(asyncio.to_thread(self._copy, source, self._run / name, {}))
        return f"{RUN}/{name}" if self.is_contained else str(self._run / name)

    @abstractmethod
    async def get(self, name: str) -> str | None:
        """The text of a file of the folder, up to `KEPT_BYTES`. None if there is no such file."""

    async def stop(self) -> None:
        """End all programs, and delete everything."""
        await run_to_completion(asyncio.to_thread(self._delete))

    def _copy(self, source: Path | None, copied: Path, texts: Mapping[str, str]) -> None:
        shutil.copytree(source, copied, symlinks=True) if source else copied.mkdir()
        for name, text in texts.items():
            (copied / name).write_text(text, encoding="utf-8", errors="replace")

    def _delete(self) -> None:
        delete_folder(self._base)


def delete_folder(path: Path) -> None:
    """Delete a folder that programs of an agent have written, whatever its rights and depth."""
    # Python 3.11 removes folders by recursion, which a deep one exceeds.
    for command in (["chmod", "-R", "u+rwX", str(path)], ["rm", "-rf", "--", str(path)]):
        try:
            subprocess.run(command, check=False, capture_output=True, timeout=STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("%s could not be deleted within %g s", path, STOP_S)


class FolderWorkspace(Workspace):
    """A folder of this machine. **No sandbox**: its programs may do all that this user may."""

    is_contained = False

    async def get(self, name: str) -> str | None:
        """None also for a link out of the folder."""
        place = self._files.resolve()
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
            ended = await run_program(command, kill=link.close, env=dict(variables), cwd=self.folder, stdin=other.fileno())
            link.setblocking(False)
            with suppress(OSError, ValueError):
                report = json.loads(link.recv(4096))  # of the guard, about the start of the command
                if "error" in report:
                    return ended._replace(stderr=f"{ended.stderr}{argv[0]} cannot be started: {report['error']}")
        return ended

    async def fork(self, server: ForkServer, told: Mapping[str, Any], variables: Mapping[str, str]) -> Ended:
        """Run a process that the server forks, as `exec` runs a command. `stdout` is the line of
        JSON that it answered, and `code` 1 if it ended without; `stderr` is all else."""
        told = {**told, "variables": dict(variables), "folder": self.folder, "limits": LIMITS}
        link, other = socket.socketpair()
        with link, other, tempfile.TemporaryFile() as errors:
            link.setblocking(False)
            async with self._waiting_sandbox() as first:
                try:
                    with other:
                        server.fork(told, other, errors.fileno(), first)
                    line = await _receive_line(link)
                finally:
                    link.shutdown(socket.SHUT_WR)
                    if first is None:
                        await run_to_completion(_wait_for_end(link))
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - KEPT_BYTES))
            stderr = errors.read().decode("utf-8", errors="replace")
        return Ended(0 if line.endswith(b"\n") else 1, line.decode(), stderr)

    def _waiting_sandbox(self) -> AbstractAsyncContextManager[int | None]:
        """A sandbox without a command; gives a file descriptor of its first process."""
        return nullcontext()


class BubblewrapWorkspace(FolderWorkspace):
    """A folder of this machine, and a new sandbox of bubblewrap for each command. It sees `/usr`,
    the folder, and `mounts` at their own paths, to read alone."""

    is_contained = True

    def __init__(self, mounts: Sequence[str] = ()) -> None:
        super().__init__()
        self._mounts, self._user = mounts, as_nobody()

    def _copy(self, source: Path | None, copied: Path, texts: Mapping[str, str]) -> None:
        super()._copy(source, copied, texts)
        self._give(copied)

    def _give(self, copied: Path) -> None:
        """Make the user of the sandbox the owner."""
        if self._user:
            self._base.chmod(0o711)
            for path in (copied, *copied.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    def _show_files(self) -> list[str]:
        """The arguments for what commands may write."""
        return ["--bind", str(self._files), self.folder]

    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        """The relay is the first process of a sandbox: all others end with it."""
        with self._sandbox(argv) as (command, options):
            return await run_program(command, told=tell(variables, LIMITS), **options)

    @asynccontextmanager
    async def _waiting_sandbox(self) -> AsyncIterator[int]:
        read_info, info = os.pipe()
        with open(read_info) as written, open(info, "w") as own, self._sandbox([], "--info-fd", str(info)) as (command, options):
            options["pass_fds"] += (info,)
            spawning = asyncio.ensure_future(start_program(command, told=tell({}, LIMITS), **options))
            try:
                await asyncio.wait([spawning])
                own.close()
                process = spawning.result()
                assert process.stdout is not None
                async with asyncio.timeout(STOP_S):
                    if not await process.stdout.readline():  # else it serves, and all is mounted
                        raise RolloutError(f"the sandbox did not start: {await _read_tail(process.stderr)}")
                first = os.pidfd_open(json.load(written)["child-pid"])
                try:
                    yield first
                finally:  # the command of bubblewrap outlives all processes if the first of them is killed
                    await run_to_completion(_end(spawning, lambda: signal.pidfd_send_signal(first, signal.SIGKILL)))
                    os.close(first)
            finally:
                await run_to_completion(_end(spawning, None))

    @contextmanager
    def _sandbox(self, argv: Sequence[str], *more: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """The command of a sandbox whose first process runs `argv`, and the options of its
        process."""
        python, size = find_python(None, others=bool(self._user)), str(64 << 20)
        arguments = ["--as-pid-1", *isolate(python), "--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"]
        arguments += ["--ro-bind", str(self._run), RUN, *self._show_files()]
        for path in self._mounts:
            arguments += ["--ro-bind", path, path]
        arguments += [*more, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", self.folder, "--clearenv"]
        filtered = os.memfd_create("ludic", 0)
        try:
            os.pwrite(filtered, seccomp_filter(network=True), 0)
            command = [str(shutil.which("bwrap")), "--seccomp", str(filtered), *arguments, "--", *RELAY, *argv]
            yield command, {"env": {}, "cwd": "/", "pass_fds": (filtered,), **self._user}
        finally:
            os.close(filtered)


def tell(variables: Mapping[str, str], limits: str = "") -> bytes:
    """The input of the relay: a line, then each variable after its length in bytes, and an empty
    one."""
    told = [*(os.fsencode(f"{name}={value}") for name, value in variables.items()), b""]
    return f"{limits}\n".encode() + b"".join(b"%d:%b" % (len(each), each) for each in told)


def read_file(name: str) -> list[str]:
    """The program of a sandbox that writes the beginning of a file: see `text_of_file`."""
    script = f'[ -f "$1" ] && [ -r "$1" ] || exit {NO_FILE}; exec head -c {KEPT_BYTES} -- "$1"'
    return ["/bin/sh", "-c", script, "sh", name]


def text_of_file(ended: Ended) -> str | None:
    """What `read_file` wrote, None if there is no such file. Raises RolloutError if it failed."""
    if ended.code not in (0, NO_FILE):
        raise RolloutError(f"a file of the sandbox could not be read, with status {ended.code}: {ended.stderr.strip()[-500:]}")
    return None if ended.code else ended.stdout


async def run_program(
    argv: Sequence[str], *, told: bytes = b"", kill: Callable[[], object] | None = None, **options: Any
) -> Ended:
    """Run a program of this machine to its end, with `told` as its input, which stays open. If the
    caller is cancelled, it is killed with its process group, or by `kill`."""
    spawning = asyncio.ensure_future(start_program(argv, told=told, **options))
    try:
        await asyncio.wait([spawning])  # a start that is cancelled may hang, or leave the process
        process = spawning.result()
        stdout, stderr, code = await asyncio.gather(_read_tail(process.stdout), _read_tail(process.stderr), process.wait())
        return Ended(code, stdout, stderr)
    finally:
        await run_to_completion(_end(spawning, kill))


async def start_program(argv: Sequence[str], *, told: bytes, **options: Any) -> asyncio.subprocess.Process:
    """Start a program with pipes, with `told` as its input, which stays open."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, start_new_session=True, **{"stdin": pipe, "stdout": pipe, "stderr": pipe, **options}
    )
    if process.stdin is not None:
        process.stdin.write(told)
    return process


async def _end(spawning: asyncio.Future[asyncio.subprocess.Process], kill: Callable[[], object] | None) -> None:
    await asyncio.wait([spawning])
    if spawning.exception() is not None:
        return
    process = spawning.result()
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            kill() if kill else os.killpg(process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()


async def _receive_line(link: socket.socket) -> bytes:
    line = bytearray()
    with suppress(ConnectionError):
        while not line.endswith(b"\n") and (part := await asyncio.get_running_loop().sock_recv(link, 2**16)):
            line += part
            if len(line) > LONGEST_ANSWER:
                raise RolloutError(f"the agent's answer has more than {LONGEST_ANSWER} bytes; return less, or write files")
    return bytes(line)


async def _wait_for_end(link: socket.socket) -> None:
    """Wait for the guard, which closes the link when all processes have ended."""
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(STOP_S):
            while await asyncio.get_running_loop().sock_recv(link, 2**16):
                pass


async def _read_tail(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    kept = b""
    while data := await stream.read(2**16):
        kept += data
        kept = kept if len(kept) < 2 * KEPT_BYTES else kept[-KEPT_BYTES:]
    return kept[-KEPT_BYTES:].decode("utf-8", errors="replace")
