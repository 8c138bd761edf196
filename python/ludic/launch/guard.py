"""Runs one command, and ends it with every process that it started, when the command ends, on
request, or when the process that started it is gone.

A guard is a pair of small processes around each command. Orphans of the command become children of
the inner one (PR_SET_CHILD_SUBREAPER), so that none escapes, not even from a session of its own,
such as the ranks of torchrun. It reads from a socket whose other end only the guard's parent holds:
each byte is the number of a signal for the command, and the end of the stream means that the parent
is gone. The outer one watches the parent and the inner one, and the inner one watches the outer
one: whichever is killed, the other ends the rest. (A process of Ray that ends kills its children,
but not theirs.) The guard ends as the command did. On systems other than Linux it ends only the
process group of the command.

This file is run as a script by an interpreter that imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

PARENT_CHECK_S = 0.2
"""How often a guard checks that its parent exists: a fork of the parent may hold the socket
open."""
POLL_S = 0.002
KILL_DEADLINE_S = 10.0
"""How long a guard waits for processes that do not end although they were killed: a process that
waits for a broken disk may not."""
_SUBREAPER, _PARENT_SIGNAL = 36, 1
"""PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG of prctl(2)."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a guard passes on to its command."""
_LINUX = sys.platform == "linux"


def guard(link: socket.socket, parent: int, start: Callable[[socket.socket], int]) -> int:
    """Run a process until it has ended with all that it started. Returns its wait status. The inner
    process calls `start` with `link`; it starts the process and returns its id."""
    if _LINUX:
        _prctl(_SUBREAPER, 1)
    alive, outer_end = os.pipe()
    outer = os.getpid()
    inner = os.fork()
    if inner == 0:
        os.close(outer_end)
        _run_inner(link, alive, outer, start)
    os.close(alive)
    link.close()
    for handled in _FORWARDED:
        signal.signal(handled, lambda number, _: _send(inner, number))
    wakeups = _wake_at_ends()
    status = None
    while status is None and os.getppid() == parent:
        if select.select([wakeups], [], [], PARENT_CHECK_S)[0]:
            os.read(wakeups, 4096)
        status, _ = _reap(inner)
    os.close(outer_end)  # the inner process ends, if it has not
    deadline = time.monotonic() + KILL_DEADLINE_S
    while status is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
        status, _ = _reap(inner)
    return _end_all(inner, status)


def _run_inner(link: socket.socket, alive: int, outer: int, start: Callable[[socket.socket], int]) -> NoReturn:
    """The inner process. `alive` ends when the outer one does."""
    if _LINUX:
        _prctl(_SUBREAPER, 1)
    wakeups = _wake_at_ends()
    child = start(link)
    for handled in _FORWARDED:
        signal.signal(handled, lambda number, _: _send(child, number))
    status: int | None = None
    while status is None:
        ready = select.select([link.fileno(), alive, wakeups], [], [], PARENT_CHECK_S)[0]
        if wakeups in ready:
            os.read(wakeups, 4096)
        message = link.recv(64) if link.fileno() in ready else None
        if message == b"" or alive in ready or os.getppid() != outer:
            break
        for number in message or b"":
            _send(child, number)
        status, _ = _reap(child)
    end_like(_end_all(child, status))


def _wake_at_ends() -> int:
    """A file that can be read once a child has ended."""
    wakeups, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
    return wakeups


def _start(link: socket.socket, argv: list[str]) -> int:
    """Start the command, and write one line of JSON to `link`: the process id, or the error."""
    guard = os.getpid()
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: _end_with_guard(guard)
        )
    except (OSError, ValueError) as error:
        link.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        os._exit(127)
    link.sendall(json.dumps({"pid": child.pid}).encode() + b"\n")
    child.returncode = 0  # it is waited for below
    return child.pid


def _end_with_guard(guard: int) -> None:
    """In the command's process: be killed with the guard."""
    if _LINUX:
        _prctl(_PARENT_SIGNAL, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(128 + signal.SIGKILL)


def _end_all(child: int, status: int | None) -> int:
    """Kill the command and every process that it left. Returns the command's wait status."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    while True:
        if not _LINUX:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        ended, has_children = _reap(child)
        status = ended if status is None else status
        if not has_children or time.monotonic() > deadline:  # orphans are children of this process
            return int(signal.SIGKILL) if status is None else status
        for pid in set(_descendants()) if _LINUX else ():
            _send(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _reap(child: int) -> tuple[int | None, bool]:
    """Collect all processes that have ended. Returns the wait status of `child` if it is one, and
    whether this process has other children left."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return status, True
            if pid == child:
                status = ended
    return status, False


def _descendants() -> Iterator[int]:
    """The processes that come from this one, zombies included: a process whose first thread has
    ended looks like one."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rsplit(b")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(name))
    todo = [os.getpid()]
    while todo:
        children_of_one = children.get(todo.pop(), [])
        yield from children_of_one
        todo += children_of_one


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def end_like(status: int) -> NoReturn:
    """End this process with the wait status of another one, without a core file of its own."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to restore
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1.0)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    end_like(guard(socket.socket(fileno=0), int(sys.argv[1]), lambda link: _start(link, sys.argv[2:])))
