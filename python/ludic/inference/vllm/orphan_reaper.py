"""Ends a server whose starter is gone, however it went: a killed process runs no code of its own
that could.

A guard is a small process beside each server, in a session of its own, that reads from a pipe whose
other end the starter alone holds. When the pipe ends without a word, the server's process group is
asked to end, and ended after the grace. The file is run as a script, by an interpreter that imports
nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

LOOK_S = 2.0
"""How often a guard looks whether its group is still there: the number of one that is gone may
come to mean another."""
POLL_S = 0.05
LEAVE_S = 10.0
"""What a guard that was dismissed may take to end."""
DISMISSED = b"dismissed\n"


class Guard:
    """Beside one server, from before it starts until `dismiss`.

    >>> guard = Guard(grace_s=15.0)
    >>> server = subprocess.Popen(command, start_new_session=True)
    >>> guard.watch(server.pid)
    """

    def __init__(self, *, grace_s: float) -> None:
        """`grace_s` lies between asking the server to end and ending it."""
        theirs, ours = os.pipe()  # closed in every program that this process starts
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), str(grace_s)],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._pipe: int | None = ours
        _STANDING.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int) -> None:
        """The process group to end when this process is gone."""
        self._tell(b"%d\n" % group)

    def dismiss(self) -> None:
        """Have the guard end and touch nothing. A second time is none."""
        if self._pipe is None:
            return
        self._tell(DISMISSED)
        self.close()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Give up this end of the pipe. If no other process has it, that is its end."""
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            os.close(pipe)
        _STANDING.discard(self)

    def _tell(self, line: bytes) -> None:
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError):  # somebody ended the guard
            os.write(self._pipe, line)


_STANDING: set[Guard] = set()


def _close_in_fork() -> None:
    """A fork that lives on would keep the pipes open after the process that it comes from."""
    for guard in list(_STANDING):
        guard.close()


os.register_at_fork(after_in_child=_close_in_fork)


def stand_guard(pipe: int, grace_s: float) -> None:
    """Read a group's number from the pipe, then wait for its end, or that of the group."""
    said = b""
    while True:
        if select.select([pipe], [], [], LOOK_S)[0]:
            chunk = os.read(pipe, 1024)
            if not chunk:
                break
            said += chunk
        elif (group := _group(said)) is not None and not _is_there(group):
            return
    group = _group(said)
    if group is not None and DISMISSED not in said:
        _end(group, grace_s)


def _group(said: bytes) -> int | None:
    number, end, _ = said.partition(b"\n")
    return int(number) if end and number.isdigit() else None


def _end(group: int, grace_s: float) -> None:
    _signal(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _is_there(group) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal(group, signal.SIGKILL)


def _is_there(group: int) -> bool:
    return _signal(group, 0)


def _signal(group: int, number: int) -> bool:
    """Whether there was somebody to get it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # some have left us
        pass
    return True


if __name__ == "__main__":
    stand_guard(sys.stdin.fileno(), float(sys.argv[1]))
