"""Reads and writes files of JSON lines: one object per line.

A process that is killed while it appends leaves half a line. Whoever appends next cuts it off
first, so that every complete line stays readable.
"""

from __future__ import annotations

import logging
import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ludic.errors import DataError
from ludic.files.atomic import name_aside
from ludic.files.json_values import encode_lines, parse_json

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16
"""Bytes of one read while looking for the last line break."""


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of every line that is not blank. Raises DataError if the file does not
    exist, and for a line that is not a JSON object."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"data file {path} does not exist")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not is_blank(line):
                yield f"{path}:{number}", parse_object(line, f"{path}:{number}")


def is_blank(line: bytes) -> bool:
    """Whether a line holds no row: nothing but the spaces of ASCII, after a byte order mark if
    there is one. Files that were joined have such a mark inside; a line may begin with it."""
    return not line.removeprefix(BOM_UTF8).strip()


def write_jsonl(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One record per line. Makes the folder, and replaces the file atomically; a pipe or a device
    is written to. `encode_lines` says how values that JSON cannot express are written."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            file.writelines(encode_lines(map(dict, records)))
        return
    aside = name_aside(path)
    with aside.open("wb") as file:
        file.writelines(encode_lines(map(dict, records)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def append_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one record per line, after `repair_last_line`. Nothing is written unless all records
    could be encoded."""
    lines = b"".join(encode_lines(records))
    repair_last_line(path)
    with path.open("ab") as file:
        file.write(lines)


def parse_object(line: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line. Raises DataError, naming `where`, for anything else."""
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}; every line must be one JSON object")
    return row


def repair_last_line(path: Path) -> None:
    """Make a file end with a complete line, so that appended text starts on a new one.

    A last line without a line break is what a killed process had written of it. It gets its line
    break if it is a complete object; otherwise it is cut off, with a warning. Example:
    `{"a": 1}\\n{"b"` becomes `{"a": 1}\\n`. A missing file is left alone, and so is anything that
    is not a regular file, such as a pipe.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        start, last = _read_last_line(file)
        if last == b"":
            return
        try:
            parse_object(last, "the last line")
        except DataError:
            logger.warning("%s ends with %d bytes of a line that was not written whole; they are cut off", path, len(last))
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def measure_log(log: Path) -> int:
    """The size of the log in bytes; 0 before its first line."""
    return log.stat().st_size if log.is_file() else 0


def truncate_log(log: Path, size: int) -> None:
    """Remove the lines after the first `size` bytes. If no line ends there, it is a different log
    and stays as it is."""
    if not log.is_file() or log.stat().st_size <= size:
        return
    with log.open("r+b") as file:
        file.seek(max(0, size - 1))
        if size == 0 or file.read(1) == b"\n":
            file.truncate(size)


def _read_last_line(file: BinaryIO) -> tuple[int, bytes]:
    """Where the text behind the last line break begins, and that text.

    Reads backwards: first one byte, since most files end with a line break, then blocks. Example:
    `a\\nbc` is read as `c`, then as the whole; its break is at 1, so the result is (2, `bc`).
    """
    start = file.seek(0, os.SEEK_END)
    tail, step = b"", 1
    while start > 0:
        step = min(step, start)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
        line_break = tail.rfind(b"\n")
        if line_break >= 0:
            return start + line_break + 1, tail[line_break + 1 :]
        step = max(_BLOCK, len(tail))
    return 0, tail
