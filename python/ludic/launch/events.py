"""`events.jsonl`: what happened to the processes of a run, one line for each event."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

EVENTS = "events.jsonl"


class EventLog:
    """Appends events to a file. Several processes may write to the same file.

    >>> EventLog(run / EVENTS).write("start", name="actor0", pid=4711)

    appends `{"time": 1790000000.0, "event": "start", "name": "actor0", "pid": 4711}`, the time in
    seconds since 1970. A line that cannot be written is reported once and lost: no run ends for its
    log.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self.path, self._now = path, now
        self._failed = False

    def write(self, event: str, /, **facts: Any) -> None:
        line = json.dumps({"time": round(self._now(), 3), "event": event, **facts}).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            if not self._failed:
                logger.warning("%s cannot be written (%s); events are not recorded", self.path, error.strerror)
            self._failed = True

    def _append(self, line: bytes) -> None:
        """Write the line with one system call, so that lines of several processes do not mix. What
        a killed process left of a line is ended first."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, b"\n" + line if torn else line)
        finally:
            os.close(handle)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, in order; none if it does not exist. Incomplete lines are skipped."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                yield event
