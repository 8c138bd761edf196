"""Computing beside the event loop without leaving threads behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(compute: Callable[..., T], *args: object) -> T:
    """What `compute(*args)` gives or raises, from a thread that ends with it. As with
    `asyncio.to_thread`, whose limit on threads it has, a call that waits for its turn can be
    cancelled, and one that runs is waited for when the loop is closed.

    The thread takes the OpenMP workers along that torch gave it. As long as they lived, libgomp
    would count more threads than cores, and put the workers of the training thread to sleep
    wherever they wait: on two idle cores that makes the forward and backward passes of a small
    model half as slow again.
    """
    return await asyncio.to_thread(_alone, compute, *args)


def _alone(compute: Callable[..., T], *args: object) -> T:
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ludic-local") as executor:
        return executor.submit(copy_context().run, compute, *args).result()
