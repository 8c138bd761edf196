"""What a process tells the kernel about itself (`prctl(2)`), and what requests and answers are."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

JSON = dict[str, Any]
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 22, 38, 41
SECCOMP_MODE_FILTER = 2
INSTRUCTION_BYTES = 8


def _find_prctl() -> Any:
    """The function of the C library, once for all processes that are forked; None if it has
    none."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except AttributeError:
        return None
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return prctl


_PRCTL = _find_prctl()


def control(option: int, value: int) -> None:
    """prctl; where there is none, nothing."""
    if _PRCTL is not None:
        _PRCTL(option, value, 0, 0, 0)


def install_filter(program: bytes) -> None:
    """Have the kernel check every system call of this process and its children with a filter
    (`seccomp(2)`). OSError if it does not take it."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // INSTRUCTION_BYTES, ctypes.addressof(instructions)))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0)):
        if _PRCTL is None or _PRCTL(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl{arguments[:2]} failed: {os.strerror(ctypes.get_errno())}")
