"""How the process of a run keeps its memory: a step on a CPU takes milliseconds, and asking the system anew each time costs many."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3)."""
MALLOC = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: (1 << 31) - 1, M_TOP_PAD: 64 << 20}
YOUNG_OBJECTS = 20_000
"""Objects made before Python looks for cycles among them; an asynchronous batch makes hundreds of thousands."""


def settle_memory() -> None:
    """To be called when a run is set up and before it is played.

    What was imported and built so far stays for good, so that the search for cycles leaves it out; and tensors that are freed go back to
    the allocator and not to the system. Variables `MALLOC_*` that are set decide instead.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has it
        if mallopt is not None:
            for parameter, value in MALLOC.items():
                mallopt(parameter, value)
