"""What leaves a training step: its log line and its weights."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ludic.distributed.interfaces import PolicyPublisher
from ludic.event_loop import await_if_needed
from ludic.inference.publishing import as_publisher
from ludic.models.published import ParamFilter
from ludic.training import ranks
from ludic.training.backend.futures import TrainFuture
from ludic.training.backend.protocol import TrainingBackend, with_defaults
from ludic.training.loggers.base import SyncedLogger, TrainingLogger

logger = logging.getLogger(__name__)


def log_safely(train_logger: TrainingLogger | None, step: int, stats: dict[str, float]) -> None:
    """Log on rank 0. If the logger fails, the run goes on."""
    if train_logger is None or ranks.rank() != 0:
        return
    try:
        train_logger.log(step, stats)
    except Exception:
        logger.exception("the logger failed at step %d; training goes on", step)


def sync_safely(train_logger: TrainingLogger | None, step: int) -> None:
    """Write what was logged to disk. Called before a checkpoint is written, so that no step is in a
    checkpoint and not in the log."""
    log: object = train_logger
    if isinstance(log, SyncedLogger) and ranks.rank() == 0:
        try:
            log.sync()
        except Exception:
            logger.exception("the logger could not be synced at step %d; training goes on", step)


async def publish_weights(
    backend: TrainingBackend,
    publisher: PolicyPublisher,
    *,
    param_filter: ParamFilter | None,
    version: int,
    expect_change: bool,
    in_thread: bool,
) -> None:
    """Have rank 0 publish the weights of the backend. A sharded model is gathered meanwhile, a part
    at a time; all ranks call this. A publisher without `needs_weights` is called on all ranks and
    gets none. `expect_change`: there was a gradient since the last push.
    `in_thread` leaves the event loop free for batches that are generated at the same time."""
    adapted = as_publisher(publisher)
    if not adapted.needs_weights:
        adapted.expect_change(expect_change)
        await _push(functools.partial(adapted.publish, {}, version=version), in_thread=in_thread)
        return
    here = with_defaults(backend)
    if here.is_sharded:
        stream = here.stream_weights(param_filter=param_filter)
        with stream.shared():
            if ranks.rank() == 0:
                adapted.expect_change(expect_change)
                await _push(functools.partial(adapted.publish_stream, stream, version=version), in_thread=in_thread)
        return
    weights = await backend.export_weights(param_filter=param_filter).result()
    with ranks.rank_0_alone(f"publishing the weights of step {version}"):
        if ranks.rank() == 0:
            adapted.expect_change(expect_change)
            await _push(functools.partial(adapted.publish, weights, version=version), in_thread=in_thread)


async def _push(publish: Callable[[], Any], *, in_thread: bool) -> None:
    await await_if_needed(await asyncio.to_thread(publish) if in_thread else publish())  # may be a coroutine function


T = TypeVar("T")


async def run_operation(backend: TrainingBackend, operation: Callable[[TrainingBackend], TrainFuture[T]], *, overlaps: bool) -> T:
    """The result of `operation(backend)`. `overlaps`: batches are generated at the same time. Then
    it runs in a thread, so that the event loop is free for them; a backend with a worker has one
    already."""
    if overlaps and not with_defaults(backend).has_worker:
        future = await asyncio.to_thread(operation, backend)
    else:
        future = operation(backend)
    return await future.result()
