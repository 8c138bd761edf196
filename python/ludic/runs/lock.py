"""A lock on a run's folder, so that only one process at a time uses it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from ludic.errors import CheckpointError

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without flock(2), on which there is no lock."""

LAUNCH_LOCK = ".launch_lock"
"""The lock of the command that starts and watches the processes of a run."""
LOOK_S = 0.2
"""How long `is_locked` of another process may have the lock."""


class RunLock:
    """Held from construction until `release`. If the process ends first, the system releases it.

    The file stays in the folder and names the last holder. The constructor raises CheckpointError,
    which names the process, if another one holds the lock.
    """

    def __init__(self, folder: Path, name: str = ".lock") -> None:
        self._file = (folder / name).open("a+", encoding="utf-8")
        try:
            _lock(self._file)
        except OSError as error:
            if error.errno in _WITHOUT_LOCKS:
                return
            self._file.seek(0)
            holder = self._file.read(200).strip() or "unknown"
            self._file.close()
            raise CheckpointError(f"{folder} is in use by process {holder}; wait until it ends, or stop it first") from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def _lock(file: IO[Any]) -> None:
    """Take the lock. One that is only looked at is free in a moment."""
    until = time.monotonic() + LOOK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.01)


def is_locked(folder: Path, name: str = ".lock") -> bool:
    """Whether a process holds the lock. Nothing is written."""
    try:
        with (folder / name).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or a file system without locks
        return False
    return False
