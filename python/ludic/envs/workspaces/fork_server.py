"""A process that has imported a function, and forks a process for each call of it: the import of
an agent's libraries costs seconds of a processor, a fork some milliseconds.

A forked process may enter the sandbox of a workspace. Then it runs as a program of that sandbox: it
sees the sandbox's files, processes and network, and has its user, its limits, its filter of system
calls and no capability. Modules that were imported before are in its memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ludic.envs.code_exec.in_sandbox.watch import PR_SET_DUMPABLE, control, install_filter
from ludic.envs.code_exec.seccomp import seccomp_filter
from ludic.errors import ConfigError
from ludic.launch.guard import end_like, guard

IMPORT_S = 300.0
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
"""Every process can read the variables that it was started with, and so can the programs of a
model: others, such as keys, are not among them."""
USER = 1000
"""Of programs in a sandbox of bubblewrap."""
_NAMESPACES = 0x7E020000
"""All that bubblewrap makes: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_PR_CAPBSET_DROP, _NUM_CAPABILITIES = 24, 64
_CAPABILITIES = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3 of capset(2)."""


class ForkServer:
    """The process. `argv` is a command of Python whose input is a socket for `serve_forks`. Started
    by the first `start`, it ends with `stop` or with this process. If what it forks enters
    sandboxes, `is_copied`: its executable, which these can open as /proc/self/exe, is a copy."""

    def __init__(self, argv: Sequence[str], *, is_copied: bool = False) -> None:
        self._argv, self._is_copied = argv, is_copied
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start it if it does not run, and wait for its import. Raises ConfigError with what it
        wrote if that fails."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._start()

    def _start(self) -> None:
        self._link, other = socket.socketpair()
        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        variables["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
        copied: AbstractContextManager[BinaryIO | None] = _copy_sealed(self._argv[0]) if self._is_copied else nullcontext()
        with other, tempfile.TemporaryFile() as errors, copied as copy:
            options: dict[str, Any] = {"stdin": other, "stdout": errors, "stderr": errors, "env": variables}
            if copy is not None:
                options |= {"executable": f"/proc/self/fd/{copy.fileno()}", "pass_fds": (copy.fileno(),)}
            self._process = subprocess.Popen(self._argv, start_new_session=True, **options)
            other.close()
            if not (select.select([self._link], [], [], IMPORT_S)[0] and self._link.recv(1)):
                self.stop()
                errors.seek(0)
                written = errors.read().decode("utf-8", errors="replace").strip()
                raise ConfigError(f"the process that forks agents did not start: {written[-2000:] or 'it reached its deadline'}")

    def fork(self, told: Mapping[str, Any], link: socket.socket, errors: int, first: int | None) -> None:
        """Fork a process for one call. `told` is for the function, and has the `variables` and the
        `folder` of the process. It writes a line of JSON to `link`, and all else to `errors`.

        `first` is a descriptor of the first process of a sandbox, which it enters; then `told` has
        `limits`. Else it ends with all that it started when nothing more is written to `link`.
        """
        assert self._link is not None
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(told).encode())
            file.seek(0)
            socket.send_fds(self._link, [b"f"], [file.fileno(), link.fileno(), errors, *([] if first is None else [first])])

    def stop(self) -> None:
        """End the process, and what it has forked outside of sandboxes."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._link = self._process = None


def _copy_sealed(program: str) -> BinaryIO:
    """A copy in memory, to which nobody can write."""
    copy = open(os.memfd_create("python", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb")  # noqa: SIM115
    copy.write(Path(program).read_bytes())
    copy.flush()
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return copy


def serve_forks(work: Callable[[Mapping[str, Any]], Any]) -> NoReturn:
    """Fork a process that writes the result of `work` for each request, until the input ends."""
    link = socket.socket(fileno=os.dup(0))
    link.settimeout(None)  # the imported module may have set another default
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
    filtered = seccomp_filter(network=True) if sys.platform == "linux" else b""
    libc = ctypes.CDLL(None, use_errno=True)
    gc.collect()
    gc.freeze()  # the collector would write to pages that all processes share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    link.sendall(b"r")
    while True:
        asked, given, *_ = socket.recv_fds(link, 1, 4)
        if not asked:
            os._exit(0)
        try:
            if os.fork() == 0:
                link.close()
                _become(given, work, filtered, libc)
        except OSError as error:  # processes or memory are used up; others go on
            os.write(given[2], str(error).encode())
        for number in given:
            os.close(number)


def _become(given: Sequence[int], work: Callable[[Mapping[str, Any]], Any], filtered: bytes, libc: Any) -> NoReturn:
    try:
        request, link_fd, errors, *first = given
        for number in (1, 2):
            os.dup2(errors, number)
        os.close(errors)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(request, "rb") as file:
            told = json.load(file)
        link = socket.socket(fileno=link_fd)
        link.settimeout(None)
        link.set_inheritable(False)  # a program of the agent answers nothing
        if first:
            for number in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, link_fd, *first}:
                os.dup2(0, number, inheritable=False)  # the module may have opened folders of this machine
            _enter(first[0], libc)
            os.close(first[0])
            if (child := os.fork()) == 0:  # the process above is not in the namespace of processes
                _give_up_rights(filtered, told["limits"], libc)
                _work(told, link, work)
            os.waitpid(child, 0)
            link.shutdown(socket.SHUT_RDWR)  # what the agent has forked has it too
        else:
            end_like(guard(link, os.getppid(), lambda ours: os.fork() or _work(told, ours, work)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _enter(first: int, libc: Any) -> None:
    """Enter the namespaces of a sandbox's first process."""
    if os.geteuid() == 0:
        os.setgroups([])
    if libc.setns(first, _NAMESPACES) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the sandbox cannot be entered ({os.strerror(number)}); it needs Linux 5.8")


def _give_up_rights(filtered: bytes, limits: str, libc: Any) -> None:
    """Become what bubblewrap makes of a program: its user, without capabilities, filtered."""
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    for limit in limits.split():
        name, most = limit.split("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (int(most), int(most)))
    for number in range(_NUM_CAPABILITIES):
        control(_PR_CAPBSET_DROP, number)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")
    control(PR_SET_DUMPABLE, 1)  # so that it can read its own /proc
    install_filter(filtered)


def _work(told: Mapping[str, Any], link: socket.socket, work: Callable[[Mapping[str, Any]], Any]) -> NoReturn:
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(told["variables"])
        os.chdir(told["folder"])
        sys.stdout = open(1, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        own, answer = os.getpid(), json.dumps(work(told)).encode()
        if os.getpid() == own:  # else the agent has forked, and returns twice
            link.sendall(answer + b"\n")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
