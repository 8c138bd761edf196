"""Returns memory that was freed to the system, in training on a CPU.

Tensors of less than 32 MB come from glibc's heaps, which keep freed memory. Long-lived tensors,
such as the optimizer's state, end up between the holes of earlier activations; other holes are in
the heap of the thread that samples. New activations do not fit into all of them, and the process
grows beyond the most memory that it ever needs.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

EVERY_S = 5.0
"""Memory is returned at most this often: the system takes about 0.25 s to give a GB again, which
would be much of a step of a small model."""


def find_allocator_function(name: str) -> Callable[..., Any] | None:
    """A function of glibc's allocator; None with another C library, and where the variables
    `MALLOC_*` or `GLIBC_TUNABLES` say what it does with freed memory."""
    if sys.platform != "linux" or any(each.startswith(("MALLOC_", "GLIBC_TUNABLES")) for each in os.environ):
        return None
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)  # only glibc has it
    return function


class FreedMemory:
    """What the process has freed and not returned.

    >>> freed = FreedMemory()
    >>> freed.return_to_system()  # between phases that keep different tensors
    """

    def __init__(self, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._trim = find_allocator_function("malloc_trim")
        self._returned_at = -float("inf")

    def return_to_system(self) -> bool:
        """Return whole pages of all heaps to the system, unless that was done less than `every_s`
        seconds ago. Returns whether it was tried."""
        if self._trim is None or self._clock() - self._returned_at < self._every_s:
            return False
        self._trim(0)
        self._returned_at = self._clock()
        return True
