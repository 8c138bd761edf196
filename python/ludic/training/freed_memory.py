"""What a process that trains or samples does with freed memory: `settle_memory` sets Python's
garbage collector and glibc's allocator, `FreedMemory` returns memory to the system.

In training on a CPU, tensors of less than 32 MB come from glibc's heaps, which keep freed memory.
Long-lived tensors, such as the optimizer's state, end up between the holes of earlier activations;
other holes are in the heap of the thread that samples. New activations do not fit into all of them,
and the process grows beyond the most memory that it ever needs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3)."""
MALLOC = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: (1 << 31) - 1, M_TOP_PAD: 64 << 20}
YOUNG_OBJECTS = 20_000
"""Allocations between two runs of Python's garbage collector; an asynchronous batch makes
hundreds of thousands."""


class _Settled:
    """How memory was managed before the outermost `settle_memory`, and how many are entered."""

    lock = threading.Lock()
    entered = 0
    thresholds = (700, 10, 10)
    frozen_here = False
    has_collected = False


@contextmanager
def settle_memory() -> Iterator[None]:
    """Training, sampling and evaluation run in it. It may be nested, also by several threads.

    Inside, the garbage collector runs less often and ignores all objects that existed before
    (`gc.freeze`), unless the program has frozen objects itself. Afterwards the collector has the
    program's settings again. Freed tensors go back to the allocator and not to the system, also
    afterwards, unless `MALLOC_*` or `GLIBC_TUNABLES` are set; the backend returns them every few
    seconds (`FreedMemory`).
    """
    with _Settled.lock:
        _Settled.entered += 1
        if _Settled.entered == 1:
            _settle()
    try:
        yield
    finally:
        with _Settled.lock:
            _Settled.entered -= 1
            if _Settled.entered == 0:
                gc.set_threshold(*_Settled.thresholds)
                if _Settled.frozen_here:
                    gc.unfreeze()


def _settle() -> None:
    if not _Settled.has_collected:  # takes .3 s with torch loaded; once, so that no garbage of the set-up is kept
        _Settled.has_collected = True
        gc.collect()
        if (mallopt := find_allocator_function("mallopt")) is not None:
            for parameter, value in MALLOC.items():
                mallopt(parameter, value)
    _Settled.thresholds = gc.get_threshold()
    _Settled.frozen_here = gc.get_freeze_count() == 0
    if _Settled.frozen_here:
        gc.freeze()
    gc.set_threshold(max(YOUNG_OBJECTS, _Settled.thresholds[0]), *_Settled.thresholds[1:])
