"""Computing beside the event loop without leaving threads behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(compute: Callable[..., T], *args: object) -> T:
    """What `compute(*args)` gives or raises, from a thread that ends with it. Whoever stops waiting does not stop it.

    Unlike the threads of `asyncio.to_thread`, it takes the OpenMP workers that torch gave it along. As long as they lived, libgomp would
    count more threads than cores, and put the workers of the training thread to sleep wherever they wait: on two cores that makes the
    forward and backward passes of a small model half as slow again.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ludic-local")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, compute, *args)
    finally:
        executor.shutdown(wait=False)
