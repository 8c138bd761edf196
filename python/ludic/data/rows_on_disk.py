"""Rows of a data set that stay on disk and are read on access: only where each one begins is in
memory.

    a.jsonl    {"prompt": "1+1="}⏎ ⏎ {"prompt": "2+2="}⏎
    starts     0, 20                 bytes before each row, 8 bytes a row
    numbers    1, 3                  lines, 8 bytes a row
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar, overload

from ludic.data.formats import Row
from ludic.data.sources import Table, find_path, open_arrow, parse_line
from ludic.errors import DataError
from ludic.files.jsonl import is_blank

S = TypeVar("S")
T = TypeVar("T")
LINES = (".jsonl", ".ndjson")


class Lazy(Sequence[T], ABC):
    """A sequence whose values are made by `read` on access, and not kept."""

    @abstractmethod
    def read(self, index: int) -> T:
        """The value at an index from 0 to `len(self) - 1`."""

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        numbers = range(len(self))[index]
        return self.read(numbers) if isinstance(numbers, int) else [self.read(number) for number in numbers]


class Changed(Lazy[T], Generic[S, T]):
    """`change(index, value)` of each value of a sequence.

    >>> list(Changed([5, 7], lambda index, value: index + value))
    [5, 8]
    """

    def __init__(self, values: Sequence[S], change: Callable[[int, S], T]) -> None:
        self._values, self._change = values, change

    def __len__(self) -> int:
        return len(self._values)

    def read(self, index: int) -> T:
        return self._change(index, self._values[index])

    def __iter__(self) -> Iterator[T]:
        return (self._change(index, value) for index, value in enumerate(self._values))


class LineRows(Lazy[Row]):
    """The rows of a JSONL file. Raises DataError, naming file and line, for a line that is no
    object, when it is read, and if the file changes after it was opened."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path.absolute()
        self._starts, self.numbers = array("q"), array("q")
        """`numbers`: the line of each row, from 1."""
        with path.open("rb") as file:
            self._stamp = _stamp(file)
            position = 0
            for number, line in enumerate(file, 1):
                if not is_blank(line):
                    self._starts.append(position)
                    self.numbers.append(number)
                position += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> Row:
        with self._open() as file:
            file.seek(self._starts[index])
            return self._parse(file.readline(), self.numbers[index])

    def __iter__(self) -> Iterator[Row]:
        with self._open() as file:
            for number, line in enumerate(file, 1):
                if not is_blank(line):
                    yield self._parse(line, number)

    def _open(self) -> BinaryIO:
        try:
            file = self._path.open("rb")
        except OSError as error:
            raise DataError(f"{self._name} cannot be read any more ({error.strerror}); put it back and resume") from error
        if _stamp(file) != self._stamp:
            file.close()
            raise DataError(f"{self._name} was changed while in use; put the old content back and resume, or begin a new run")
        return file

    def _parse(self, line: bytes, number: int) -> Row:
        return parse_line(line, f"{self._name}, line {number}")


def open_table(source: str, *, config: str | None = None, split: str = "train") -> Table:
    """The rows of a JSONL file, a parquet file, a folder or a hub id, left on disk. `config` and
    `split` are for ids and folders. Raises DataError for anything else."""
    fault = f"cannot stay on disk; {', '.join(LINES)}, .parquet, folders and ids of the hub can, or set streaming=false"
    path = find_path(source, (*LINES, ".parquet"), fault)
    if path is not None and path.is_file() and path.suffix.lower() in LINES:
        rows = LineRows(source, path)
        return Table(source, "line", rows, rows.numbers, folder=path.parent)
    loaded = open_arrow(source, source if path is None else str(path), config, split)
    rows_of_arrow = Changed(
        loaded, lambda _, row: dict(row) if isinstance(row, dict) else row.to_pylist()[0]
    )  # mapped from files
    folder = None if path is None else path if path.is_dir() else path.parent
    return Table(source, "row", rows_of_arrow, range(1, len(loaded) + 1), folder=folder)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns
