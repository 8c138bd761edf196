"""Logs to a JSONL file: one line with a JSON object per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO


class JSONLLogger:
    """Appends `{"step": ..., <statistics>}` to a file and flushes it after each line. Values that
    are not finite become null.

    >>> with JSONLLogger("runs/a/metrics.jsonl") as logger:
    ...     logger.log(1, {"train/loss": 0.5})
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_cut_short = self.path.is_file() and not _ends_with_a_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
            self._file.write("\n" if is_cut_short else "")  # an incomplete last line, left by a full disk, gets its line break
        record = {"step": step, **{key: _null_if_not_finite(value) for key, value in stats.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush all lines to disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> JSONLLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


def _null_if_not_finite(value: float) -> float | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
