"""One process at a time works in a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from ludic.errors import CheckpointError

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems without flock(2) answer."""


class RunLock:
    """Held from its making until `release`, or until the process ends, however it does: the system
    lets go of it then.

    The file stays in the folder and names who held it last. Raises CheckpointError, with the
    process, where another holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
