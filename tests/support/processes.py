"""Whether processes of other processes are still there."""

import os
import time
from pathlib import Path


def is_running(pid):
    """A process that has ended and was not asked for its status is not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def until_gone(pid, timeout_s=60.0):
    """Whether it ended in time."""
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
