"""What a process tells the kernel about itself (`prctl(2)`)."""

from __future__ import annotations

import contextlib
import ctypes

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


def control(option: int, value: int) -> None:
    """prctl; where there is none, nothing."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
