"""What leaves a training step: its log line and its weights."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ludic.distributed.interfaces import PolicyPublisher
from ludic.event_loop import await_if_needed
from ludic.inference.publishing import as_publisher
from ludic.training import ranks
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


async def push_weights(
    publisher: PolicyPublisher, weights: Mapping[str, Tensor], *, version: int, expect_change: bool, in_thread: bool
) -> None:
    """Publish `weights`. `expect_change`: there was a gradient since the last push. `in_thread`
    leaves the event loop free for batches that are generated at the same time."""
    adapted = as_publisher(publisher)
    adapted.expect_change(expect_change)
    publish: Any = functools.partial(adapted.publish, weights, version=version)  # may be a coroutine function
    await await_if_needed(await asyncio.to_thread(publish) if in_thread else publish())
