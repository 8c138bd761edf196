"""Worker processes of a run as forks: in the process of `ludic train place.actors=N`, guards and
the commands under them are forked from a child that has imported everything and has no threads.

The guards are those of `ludic.launch.guard`; only their start is another.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import NoReturn

from ludic.launch import guard, local

_SUBREAPER, _PARENT_SIGNAL = 36, 1
"""PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG of prctl(2)."""


def fork_workers(run_command: Callable[[Sequence[str]], int]) -> None:
    """Fork the workers that this process starts on this machine from now on. `run_command` gets
    the arguments of `ludic` and returns the exit status. To be called before there are threads."""
    server = _ForkServer(run_command)
    local.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=server.start_guard, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )


class _ForkServer:
    """The child that forks guards. They become children of this process, which is a subreaper,
    since the process between them ends at once."""

    def __init__(self, run_command: Callable[[Sequence[str]], int]) -> None:
        _prctl(_SUBREAPER, 1)
        owner = os.getpid()
        self._link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            _prctl(_PARENT_SIGNAL, signal.SIGKILL)
            self._link.close()
            with _ending():
                _serve(other, owner, run_command)
        other.close()

    def start_guard(
        self, command: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: int, **_: object
    ) -> _ForkedGuard:
        """As `subprocess.Popen` starts `PYTHON -I -S guard.py PARENT PYTHON -m ludic.cli ...`."""
        request = {"arguments": list(command[8:]), "environment": dict(env)}
        fds = [stdin, stdout if isinstance(stdout, int) else stdout.fileno()]
        socket.send_fds(self._link, [json.dumps(request).encode()], fds)
        return _ForkedGuard(int(self._link.recv(64)))


class _ForkedGuard:
    """The part of `subprocess.Popen` that a place uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None and (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(done[1])
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            handle = os.pidfd_open(self.pid)
            ended = select.select([handle], [], [], timeout)[0]
            os.close(handle)
            if not ended:
                raise subprocess.TimeoutExpired("guard", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _serve(link: socket.socket, owner: int, run_command: Callable[[Sequence[str]], int]) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(link, 1 << 20, 2)
        if not message:
            return
        between = os.fork()
        if between == 0:
            with _ending():
                pid = os.fork()
                if pid == 0:
                    _become_guard(owner, fds, run_command, **json.loads(message))
                link.send(str(pid).encode())
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _become_guard(
    owner: int,
    fds: Sequence[int],
    run_command: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> NoReturn:
    os.setsid()
    for target, source in zip((0, 1, 2), (fds[0], fds[1], fds[1]), strict=True):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    while os.getppid() != owner:  # until the process between has ended
        time.sleep(0.001)

    def start(link: socket.socket) -> int:
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            link.close()
            with _ending():
                _become_command(parent)
                raise SystemExit(run_command(arguments))
        link.sendall(json.dumps({"pid": child}).encode() + b"\n")
        return child

    guard.end_like(guard.guard(socket.socket(fileno=0), owner, start))


def _become_command(parent: int) -> None:
    """What the guard's own start does between fork and exec."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    _prctl(_PARENT_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


@contextlib.contextmanager
def _ending() -> None:
    """End the process where the block ends."""
    status = 0
    try:
        yield
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
