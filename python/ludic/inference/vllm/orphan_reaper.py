"""Stops a server after its parent process has ended, even if that was killed and ran no cleanup
code.

A reaper is a small process for each server, in its own session. It reads from a pipe whose other
end only the server's parent holds. When the pipe closes without a dismissal, the reaper sends
SIGTERM to the server's process group, and SIGKILL after the grace period. This file is run as a
script by an interpreter that imports only the standard library.

`launch.guard` stands between a process and its parent, and kills immediately. A server gets time to
end, and the `Popen` object that its starter has must be the server itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

CHECK_S = 2.0
"""How often a reaper checks that its group still exists, because the system may reuse the id of a
group that has ended."""
POLL_S = 0.05
EXIT_S = 10.0
"""How long a dismissed reaper may take to exit."""
DISMISSED = b"dismissed\n"


class OrphanReaper:
    """The reaper of one server, from before the server starts until `dismiss`.

    >>> reaper = OrphanReaper(grace_s=15.0)
    >>> server = subprocess.Popen(command, start_new_session=True)
    >>> reaper.watch(server.pid)
    """

    def __init__(self, *, grace_s: float) -> None:
        """`grace_s` is the time between SIGTERM and SIGKILL."""
        read_end, write_end = os.pipe()  # not inherited by the programs that this process starts
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), str(grace_s)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        self._pipe: int | None = write_end
        _ACTIVE.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int) -> None:
        """Set the process group that is stopped when this process has ended."""
        self._write(b"%d\n" % group)

    def dismiss(self) -> None:
        """Make the reaper exit without stopping the server. A second call does nothing."""
        if self._pipe is None:
            return
        self._write(DISMISSED)
        self.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close this end of the pipe, which ends the pipe unless another process holds it too."""
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            os.close(pipe)
        _ACTIVE.discard(self)

    def _write(self, line: bytes) -> None:
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed
            os.write(self._pipe, line)


_ACTIVE: set[OrphanReaper] = set()


def _close_in_fork() -> None:
    """Close the pipes in a forked process, which would keep them open if it outlived this one."""
    for reaper in list(_ACTIVE):
        reaper.close()


os.register_at_fork(after_in_child=_close_in_fork)


def reap_at_end(pipe: int, grace_s: float) -> None:
    """Read a process group id from the pipe; stop the group when the pipe closes. Return early if
    the group ends by itself."""
    message = b""
    while True:
        if select.select([pipe], [], [], CHECK_S)[0]:
            chunk = os.read(pipe, 1024)
            if not chunk:
                break
            message += chunk
        elif (group := _group_id(message)) is not None and not _exists(group):
            return
    group = _group_id(message)
    if group is not None and DISMISSED not in message:
        _stop(group, grace_s)


def _group_id(message: bytes) -> int | None:
    number, end, _ = message.partition(b"\n")
    return int(number) if end and number.isdigit() else None


def _stop(group: int, grace_s: float) -> None:
    _signal(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _exists(group) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal(group, signal.SIGKILL)


def _exists(group: int) -> bool:
    return _signal(group, 0)


def _signal(group: int, number: int) -> bool:
    """Signal a process group. Returns whether it exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # some processes have changed their user
        pass
    return True


if __name__ == "__main__":
    reap_at_end(sys.stdin.fileno(), float(sys.argv[1]))
