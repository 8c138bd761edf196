"""Calls of a log from asynchronous code, repeated while the log cannot be reached."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ludic.errors import ConfigError, QueueDataLost, QueueError, QueueRefused

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Between two tries; doubled each time, and varied so that processes do not come at once."""


class Patience:
    """Runs calls in threads, so that the event loop goes on, and repeats one that raises QueueError
    for up to `patience_s` seconds. `QueueDataLost` and `QueueRefused` are raised at once: they do
    not pass by themselves. Simulations replace `sleep`, `clock` and `run`."""

    def __init__(
        self,
        patience_s: float,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[[Callable[[], Any]], Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        if not patience_s > 0:
            raise ConfigError(f"patience_s ({patience_s}) must be > 0: it is how long a queue may be unreachable")
        self.patience_s, self.sleep, self.clock, self.run = patience_s, sleep, clock, run
        self.interruptions = 0
        """Calls that succeeded only after the log had been unreachable."""

    async def call(self, what: str, operation: Callable[[], T]) -> T:
        """Return `operation()`. `what` says in messages what is being done."""
        started, wait_s = self.clock(), FIRST_WAIT_S
        failed = False
        while True:
            try:
                result: T = await self.run(operation)
            except (QueueDataLost, QueueRefused):
                raise
            except QueueError as error:
                waited_s = self.clock() - started
                if waited_s >= self.patience_s:
                    raise QueueError(
                        f"{what}: gave up after {waited_s:.0f} s (patience_s is {self.patience_s:g}): {error}"
                    ) from error
                if not failed:
                    logger.warning("%s: %s; trying again for up to %g s", what, error, self.patience_s)
                failed = True
                await self.sleep(min(wait_s, self.patience_s) * random.SystemRandom().uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                self.interruptions += failed
                return result
