"""Files of JSON, one object a line."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ludic.errors import DataError

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of every line that is not blank. Raises DataError for a file that is
    not there, or a line that is no object."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"data file {path} does not exist")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _object(line, f"{path}:{number}")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}; every line must be one JSON object")
    return row


def end_last_line(path: Path) -> None:
    """Make a file end with a whole line, so that what is appended begins on its own.

    A last line without its line break is what a process that was killed has written of it: it is
    cut off, with a warning, unless it is a whole object. What is no ordinary file, such as a pipe,
    is left alone.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        start, last = _last_line(file)
        if last == b"":
            return
        try:
            _object(last, "the last line")
        except DataError:
            logger.warning("%s ends with %d bytes of a line that was not written whole; they are cut off", path, len(last))
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _last_line(file: BinaryIO) -> tuple[int, bytes]:
    """What follows the last line break, and where it begins."""
    start = file.seek(0, os.SEEK_END)
    tail, step = b"", 1  # most files end with their line break
    while start > 0:
        step = min(step, start)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
        found = tail.rfind(b"\n")
        if found >= 0:
            return start + found + 1, tail[found + 1 :]
        step = max(_BLOCK, len(tail))
    return 0, tail
