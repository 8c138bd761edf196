"""The log file of each process."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

TAIL_LINES, TAIL_BYTES = 20, 4096
ROTATE_BYTES = 64 << 20
"""A log that is longer when its process starts again moves to NAME.log.1, whose content is lost."""


class ProcessLog:
    """`FOLDER/NAME.log`: all that a process wrote, one attempt after the other."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.log"
        self._begin = 0

    def open(self) -> BinaryIO:
        """The file to which the next attempt writes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > ROTATE_BYTES:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        file = self.path.open("ab")
        self._begin = file.tell()
        return file

    def tail(self) -> str:
        """The last lines of this attempt."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                begin = min(self._begin, end)  # the file may have been emptied
                file.seek(max(begin, end - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode("utf-8", errors="replace")
        except OSError as error:
            return f"({self.path}: {error.strerror})"
        return "\n".join(text.splitlines()[-TAIL_LINES:])
