"""Memory settings of a training process. A step on a CPU takes milliseconds; returning memory to
the system and asking for it again would cost several more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3)."""
MALLOC = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: (1 << 31) - 1, M_TOP_PAD: 64 << 20}
YOUNG_OBJECTS = 20_000
"""Allocations between two runs of Python's garbage collector; an asynchronous batch makes
hundreds of thousands."""


@contextmanager
def settle_memory() -> Iterator[None]:
    """Wrap a run in it after the set-up.

    Inside, the garbage collector runs less often and ignores all objects that existed before
    (`gc.freeze`), unless the program has frozen objects itself. Freed tensors go back to the
    allocator and not to the system, also afterwards, unless `MALLOC_*` or `GLIBC_TUNABLES` are set;
    the backend returns them every few seconds (`FreedMemory`).
    """
    from ludic.training.backend.memory import find_allocator_function  # imports torch

    if (mallopt := find_allocator_function("mallopt")) is not None:
        for parameter, value in MALLOC.items():
            mallopt(parameter, value)
    thresholds = gc.get_threshold()
    frozen_here = gc.get_freeze_count() == 0
    gc.collect()
    if frozen_here:
        gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if frozen_here:
            gc.unfreeze()
