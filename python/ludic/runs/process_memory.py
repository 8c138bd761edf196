"""How the process of a run keeps its memory: a step on a CPU takes milliseconds, and asking the
system anew each time costs many."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3)."""
MALLOC = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: (1 << 31) - 1, M_TOP_PAD: 64 << 20}
YOUNG_OBJECTS = 20_000
"""Objects made before Python looks for cycles among them; an asynchronous batch makes hundreds
of thousands."""


@contextmanager
def settled_memory() -> Iterator[None]:
    """Around the play of a run that is set up.

    Inside, what was imported and built before is left out of the search for cycles, and the search
    is made less often. From here on, tensors that are freed go back to the allocator and not to the
    system; variables `MALLOC_*` and `GLIBC_TUNABLES` that are set decide instead.
    """
    _keep_freed_tensors()
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _keep_freed_tensors() -> None:
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has it
    if mallopt is not None:
        for parameter, value in MALLOC.items():
            mallopt(parameter, value)
