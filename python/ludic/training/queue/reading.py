"""Reads and decodes the entries of a log, also while the trainer computes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from ludic.errors import LudicError
from ludic.training.queue.base import Entry, GroupLog
from ludic.training.queue.entries import Group, decode_group
from ludic.training.queue.envelope import EntryError, EntryLimits
from ludic.training.queue.patience import Patience
from ludic.training.rollouts.check import SampleCheck

logger = logging.getLogger(__name__)

READ_S = 1.0
"""How long one reading of the log waits for an entry."""
POLL_S = 0.2
"""How often the log is looked at while the trainer computes."""


class EntryReader:
    """The entries that are read and not taken, each with its group or the reason to refuse it."""

    def __init__(self, log: GroupLog, run: str, limits: EntryLimits, patience: Patience) -> None:
        self._log, self._run, self._limits, self._patience = log, run, limits, patience
        self.entries: deque[tuple[Entry, Group | EntryError]] = deque()
        self._ahead: asyncio.Task[None] | None = None
        self.check: SampleCheck | None = None
        """The trainer's, once it has asked for a batch."""

    def last_position(self, taken: str | None) -> str | None:
        """The position of the last entry that was read; `taken` is that of the last one taken."""
        return self.entries[-1][0].position if self.entries else taken

    async def read(self, taken: str | None, timeout_s: float = READ_S) -> None:
        """Read the next entries, and wait up to `timeout_s` seconds for the first. Where this is
        cancelled, nothing is read."""
        after = self.last_position(taken)
        self.entries.extend(await self._patience.call("reading groups", lambda: self._read(after, timeout_s)))

    async def scan(self, taken: str | None) -> dict[int, str]:
        """The groups of all entries that are not taken, each with the position of its last entry.
        What is read for it is not kept."""
        positions = {entry.number: entry.position for entry, _ in self.entries if entry.number is not None}
        position = self.last_position(taken)
        while entries := await self._patience.call("reading groups", partial(self._log.read, position)):
            positions |= {entry.number: entry.position for entry in entries if entry.number is not None}
            position = entries[-1].position
        return positions

    def clear(self) -> None:
        """Forget what was read, and stop reading ahead."""
        self.entries.clear()
        if self._ahead is not None:
            self._ahead.cancel()

    def read_ahead(self, taken: Callable[[], str | None], count: int) -> None:
        """Begin to read until `count` entries are there."""
        self._ahead = asyncio.create_task(self._read_ahead(taken, count))

    async def stop_reading_ahead(self) -> None:
        """Keep what was read. An error is raised by the next `read`, if it lasts."""
        task, self._ahead = self._ahead, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _read_ahead(self, taken: Callable[[], str | None], count: int) -> None:
        try:
            while len(self.entries) < count:
                await self.read(taken(), timeout_s=0.0)
                await self._patience.sleep(POLL_S)
        except LudicError as error:
            logger.info("reading ahead ended: %s", error)

    def _read(self, after: str | None, timeout_s: float) -> list[tuple[Entry, Group | EntryError]]:
        """Read and decode; runs in a thread."""
        return [(entry, self._decode(entry)) for entry in self._log.read(after, timeout_s=timeout_s)]

    def _decode(self, entry: Entry) -> Group | EntryError:
        try:
            group = decode_group(entry.payload, self._limits, self.check)
        except EntryError as error:
            return error
        if group.number != entry.number:
            return EntryError(f"the entry of group {entry.number} holds group {group.number}")
        if group.run != self._run:
            return EntryError(f"the entry is of run {group.run}, this is {self._run}")
        return group
