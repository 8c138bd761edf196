"""Runs the operations of a backend without stopping what else the event loop has to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ludic.training.backend.futures import TrainFuture
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.backend.torch import TorchBackend

T = TypeVar("T")


async def run_operation(backend: TrainingBackend, operation: Callable[[TrainingBackend], TrainFuture[T]], *, overlaps: bool) -> T:
    """The result of `operation(backend)`. `overlaps`: batches are generated at the same time. Then
    it runs in a thread, so that the event loop is free for them; a backend with a worker has one
    already."""
    has_worker = isinstance(backend, TorchBackend) and backend.has_worker
    if overlaps and not has_worker:
        future = await asyncio.to_thread(operation, backend)
    else:
        future = operation(backend)
    return await future.result()
