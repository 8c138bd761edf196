"""Opens the log that a setting names: a file, or a Redis server."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from ludic.errors import ConfigError, OwnershipLost, QueueDataLost, QueueError, QueueRefused, check_value
from ludic.training.queue.base import GroupLog
from ludic.training.queue.sqlite import SQLiteLog

logger = logging.getLogger(__name__)

FILE_NAME = "queue.sqlite"
"""The file in a run's folder."""
URL_VARIABLE = "LUDIC_QUEUE_URL"
"""Environment variable that is read where the URL is empty, so that no script has a password."""


def open_log(where: str | Path, *, name: str, timeout_s: float = 30.0) -> GroupLog:
    """The log at `redis://` or `rediss://`, whose keys begin with `name`, or that in a folder or
    in a file of SQLite. Each call of the log takes at most `timeout_s` seconds.

    Nothing is reached or created yet. Raises ConfigError for another kind of address, without
    showing it: it may have a password.

    >>> log = open_log("runs/sort", name="sort")
    >>> log.path
    PosixPath('runs/sort/queue.sqlite')
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", str(where))
    if scheme is None:
        path = Path(where)
        return SQLiteLog(path / FILE_NAME if path.suffix != ".sqlite" else path, timeout_s=timeout_s)
    if scheme[1] not in ("redis", "rediss"):
        raise ConfigError(f"a queue at {scheme[1]}:// is unknown; give redis://, rediss:// (with TLS), or a folder")
    from ludic.training.queue.redis import RedisLog

    return RedisLog(str(where), name, deadline_s=timeout_s)


def open_server_queue(url: str, name: str) -> GroupLog:
    """The log `name` on the Redis server at `url`, or if that is empty at the one that
    LUDIC_QUEUE_URL names."""
    from ludic.training.queue.redis import RedisLog  # raises an error that names the extra

    url = url or os.environ.get(URL_VARIABLE, "")
    if not url:
        raise ConfigError(f"redis_url and {URL_VARIABLE} are empty; give the URL of a Redis server, such as redis://host:6379")
    return RedisLog(url, name)


def make_owner_name() -> str:
    """A name that no other process has, and that says where to look for this one."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class ClaimKeeper:
    """Renews the claim from a thread, three times in `ttl_s` seconds: the event loop may be busy
    with a step for longer than that."""

    def __init__(self, log: GroupLog, owner: str, ttl_s: float) -> None:
        self._log, self._owner, self._ttl_s = log, owner, ttl_s
        self._stop = threading.Event()
        self._lost: OwnershipLost | None = None
        self._thread = threading.Thread(target=self._renew, name="ludic-queue-claim", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise OwnershipLost if another trainer has claimed the log."""
        if self._lost is not None:
            raise self._lost

    def stop(self) -> None:
        """End the thread; a call that runs is not waited for."""
        self._stop.set()

    def _renew(self) -> None:
        while not self._stop.wait(self._ttl_s / 3):
            try:
                self._log.renew_claim(self._owner, ttl_s=self._ttl_s)
            except OwnershipLost as error:
                self._lost = error
                return
            except QueueError as error:  # unreachable, or its data are gone: the source heals it when it reads
                logger.info("the claim of the queue was not renewed: %s", error)


T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Between two tries; doubled each time, and varied so that processes do not all come at the same
time."""


class QueueRetryPolicy:
    """Runs calls in threads, so that the event loop goes on, and repeats one that raises QueueError
    for up to `patience_s` seconds. `QueueDataLost` and `QueueRefused` are raised immediately:
    waiting does not help. Simulations replace `sleep`, `clock` and `run`."""

    def __init__(
        self,
        patience_s: float,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[[Callable[[], Any]], Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        check_value("patience_s", patience_s, "it is how long a queue may be unreachable", above=0)
        self.patience_s, self.sleep, self.clock, self.run = patience_s, sleep, clock, run
        self.interruptions = 0
        """Calls that succeeded only after the log had been unreachable."""

    async def call(self, what: str, operation: Callable[[], T]) -> T:
        """Return `operation()`. `what` names the operation in messages."""
        started, wait_s = self.clock(), FIRST_WAIT_S
        failed = False
        while True:
            try:
                result: T = await self.run(operation)
            except (QueueDataLost, QueueRefused):
                raise
            except QueueError as error:
                waited = self.clock() - started
                if waited >= self.patience_s:
                    raise QueueError(f"{what}: gave up after {waited:.0f} s (patience_s {self.patience_s:g}): {error}") from error
                if not failed:
                    logger.warning("%s: %s; trying again for up to %g s", what, error, self.patience_s)
                failed = True
                await self.sleep(min(wait_s, self.patience_s) * random.SystemRandom().uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                self.interruptions += failed
                return result
