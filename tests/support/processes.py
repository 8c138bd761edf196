"""Check whether other processes still run."""

import os
import time
from pathlib import Path


def is_running(pid):
    """A zombie process counts as ended."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_for_end(pid, timeout_s=60.0):
    """Wait for the process to end. Returns whether it did in time."""
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
