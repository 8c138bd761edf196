"""Keeps the claim of a trainer while it computes."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid

from ludic.errors import OwnershipLost, QueueError
from ludic.training.queue.base import GroupLog

logger = logging.getLogger(__name__)


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
