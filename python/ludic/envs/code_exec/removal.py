"""Removes the containers of sandboxes, also those that a process which was killed has left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Protocol

from ludic.envs.code_exec.containers import has_ended
from ludic.errors import GradingError

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What makes containers, as far as it ends them."""

    def list_owners(self) -> Mapping[str, str]:
        """The name of each container with the label OWNER, in any state, and the label's value.
        GradingError if they cannot be listed."""

    def remove(self, container: str) -> None:
        """Kill and remove a container, which may be gone already, and return when it is gone.
        GradingError if it is not in time."""


class Remover:
    """Removes containers of an engine, and keeps the names of those that it could not remove. For
    any number of threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._failed: set[str] = set()

    @property
    def failed(self) -> frozenset[str]:
        """The containers that could not be removed, and may still be there."""
        with self._lock:
            return frozenset(self._failed)

    def remove(self, container: str) -> None:
        """Kill and remove a container. GradingError if that fails; it is then tried again with the
        next `remove_leftovers`."""
        with self._lock:
            self._failed.add(container)
        self._engine.remove(container)
        with self._lock:
            self._failed.discard(container)

    def remove_leftovers(self) -> None:
        """Remove the containers that could not be removed before, and those of processes that have
        ended: one that is killed between the creation and the start of a container leaves it. What
        cannot be removed now is logged. GradingError if the containers cannot be listed."""
        before, owners = self.failed, self._engine.list_owners()
        with self._lock:
            self._failed -= before - owners.keys()  # gone by themselves
        for container, owner in owners.items():
            if container in before or has_ended(owner):
                try:
                    self.remove(container)
                except GradingError as error:
                    logger.warning("%s", error)
