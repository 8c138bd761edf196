"""What a rank other than 0 prints: into a file of the run's folder instead of the terminal."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO


class RankLog(io.TextIOBase):
    """A text stream that keeps what is written until the run's folder is known (`open_file`).

    >>> with RankLog(rank=1).in_use() as log:
    ...     print("this goes to ranks/rank_0001.log")
    ...     log.open_file(directory.ranks)
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._early = io.StringIO()
        self._file: TextIO | None = None

    def open_file(self, folder: Path) -> None:
        """Write to `folder/rank_NNNN.log` from now on, what was written before first. A log of an
        earlier start is continued."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank_{self._rank:04d}.log").open("a", encoding="utf-8", buffering=1)
        self._file.write(self._early.getvalue())

    def write(self, text: str) -> int:
        return (self._early if self._file is None else self._file).write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        super().close()

    @contextmanager
    def in_use(self) -> Iterator[RankLog]:
        """Let standard output and logged warnings go to the log; logged errors go to standard
        error too, with the rank."""
        warnings = logging.StreamHandler(self)
        errors = logging.StreamHandler(sys.stderr)
        errors.setLevel(logging.ERROR)
        errors.setFormatter(logging.Formatter(f"rank {self._rank}: %(message)s"))
        root = logging.getLogger()
        for handler in (warnings, errors):
            root.addHandler(handler)
        try:
            with redirect_stdout(self):
                yield self
        finally:
            for handler in (warnings, errors):
                root.removeHandler(handler)
