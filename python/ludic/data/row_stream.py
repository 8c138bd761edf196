"""Rows of data sets that are larger than memory: read in blocks, shuffled in each, pass after pass.

A block is `buffer_rows` consecutive rows; only one is in memory. The order of the files in a pass
follows from the seed and the number of the pass, the order of the rows in a block from those and
the number of the block. So the place where the block begins and the offset in it are the whole
state, and a resumed run reads that block again and goes on.

    files in the order of the pass   [b.jsonl | a.jsonl]
    blocks of 4 rows                 b1 b2 b3 a1 | a2 a3
    rows                             b3 a1 b1 b2 | a3 a2

A reader reads one file, or one data set of the `datasets` library, from a position on. A position
is a JSON value that only its reader understands; None is the beginning, or the end. No file is open
between two reads. `read(position, rows)` returns up to `rows` of (place, raw row) and the position
of the next row. `parse(raw, place)` makes a row of a raw one, and raises DataError if it is none.
`count()` is None if the number of rows is not known without reading them. `identity()` changes with
the content, as far as can be seen without reading it whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ludic.data.formats import Row
from ludic.data.row_images import intern_row
from ludic.data.sources import find_path, is_saved_data_set, open_arrow, parse_line
from ludic.errors import ConfigError, DataError, MissingExtraError, import_optional
from ludic.files.jsonl import is_blank

_PARQUET_ROWS = 1024
"""Rows that are decoded at a time."""
_HASHED_BYTES = 65_536
_HELD_OUT = re.compile(r"(test|val|valid|validation|dev)[-_.]", re.IGNORECASE)


def open_readers(sources: Sequence[str]) -> list[RowReader]:
    """The readers of files, folders of files, and ids. Raises DataError for what cannot be read as
    a stream."""
    readers: list[RowReader] = []
    fault = f"cannot be read as a stream; files that can end in {', '.join(_FILES)}; name others, or set streaming=false"
    for source in sources:
        path = find_path(source, _FILES, fault)
        if path is None or is_saved_data_set(path):
            readers.append(DatasetsReader(source))
        elif path.is_dir():
            readers += [_FILES[shard.suffix.lower()](str(shard), shard) for shard in _list_shards(path, source)]
        else:
            readers.append(_FILES[path.suffix.lower()](source, path))
    return readers


def _list_shards(folder: Path, source: str) -> list[Path]:
    """The files of a folder, by name. Raises DataError if one of them would not be read."""
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "_", "README")))
    left = [path.name for path in inside if path.suffix.lower() not in _FILES]
    tests = [path.name for path in inside if _HELD_OUT.match(path.name)]
    if left or tests:
        fault = "cannot be streamed" if left else "looks like held-out rows"
        raise DataError(f"{source} has {(left or tests)[0]}, which {fault}; name the files to train on ({', '.join(_FILES)})")
    if not inside:
        raise DataError(f"{source} has no files that can be streamed ({', '.join(_FILES)})")
    return inside


class _FileReader:
    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path, self.folder = name, path, path.parent

    def identity(self) -> Any:
        """Its name, its size, and a hash of its first and last bytes."""
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            head = file.read(_HASHED_BYTES)
            file.seek(max(0, size - _HASHED_BYTES))
            return self._path.name, size, sha256(head + file.read()).hexdigest()[:16]


class JSONLReader(_FileReader):
    """One object a line. A position is [bytes, lines] before the next line."""

    def read(self, position: Any, rows: int) -> tuple[list[tuple[str, Any]], Any]:
        offset, number = position or (0, 0)
        found: list[tuple[str, Any]] = []
        with self._path.open("rb") as file:
            file.seek(offset)
            while len(found) < rows:
                line = file.readline()
                if not line:
                    return found, None
                offset, number = offset + len(line), number + 1
                if not is_blank(line):
                    found.append((f"{self.name}, line {number}", line))
        return found, [offset, number]

    def parse(self, raw: Any, place: str) -> Row:
        return parse_line(raw, place)

    def count(self) -> int:
        with self._path.open("rb") as file:
            return sum(not is_blank(line) for line in file)


class ParquetReader(_FileReader):
    """A position is [row group, row in it]."""

    def read(self, position: Any, rows: int) -> tuple[list[tuple[str, Any]], Any]:
        group, skipped = position or (0, 0)
        found: list[tuple[str, Any]] = []
        with self._open() as file:
            groups = file.metadata.num_row_groups
            before = sum(file.metadata.row_group(index).num_rows for index in range(group))
            while group < groups and len(found) < rows:
                size = file.metadata.row_group(group).num_rows
                taken = min(size - skipped, rows - len(found))
                for offset, row in _rows_of_group(file, group, skipped, taken):
                    found.append((f"{self.name}, row {before + offset + 1}", row))
                skipped += taken
                if skipped == size:
                    group, skipped, before = group + 1, 0, before + size
        return found, [group, skipped] if group < groups else None

    def _open(self) -> Any:
        parquet = import_optional("pyarrow.parquet", "datasets")
        try:
            return parquet.ParquetFile(self._path)
        except (OSError, ValueError) as error:  # pyarrow's errors are these
            raise DataError(f"{self.name} is not a parquet file: {error}") from error

    def parse(self, raw: Any, place: str) -> Row:
        return raw

    def count(self) -> int:
        with self._open() as file:
            return file.metadata.num_rows


def _rows_of_group(file: Any, group: int, skipped: int, taken: int) -> Iterator[tuple[int, Row]]:
    """(number in the group, row) of `taken` rows after the first `skipped`."""
    number = 0
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group]):
        first, last = max(skipped - number, 0), min(skipped + taken - number, batch.num_rows)
        if first < last:
            for offset, row in enumerate(batch.slice(first, last - first).to_pylist()):
                yield number + first + offset, row
        number += batch.num_rows
        if number >= skipped + taken:
            return


class DatasetsReader:
    """A data set that the `datasets` library streams, from the hub or from a folder. A position is
    {"rows": number of rows before, "state": the library's}."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Path(name).expanduser() if Path(name).expanduser().is_dir() else None
        self._data: Any = None
        self._rows: Iterator[Any] | None = None
        self._at: Any = None
        """Where `_rows` is."""

    def read(self, position: Any, rows: int) -> tuple[list[tuple[str, Any]], Any]:
        try:
            return self._take(position, rows)
        except (DataError, MissingExtraError):
            raise
        except Exception as error:  # its exceptions have no common base
            raise DataError(f"{self.name} (split train) could not be streamed: {type(error).__name__}: {error}") from error

    def _take(self, position: Any, rows: int) -> tuple[list[tuple[str, Any]], Any]:
        number = 0 if position is None else int(position["rows"])
        if self._rows is None or position != self._at or position is None:
            path = Path(self.name).expanduser()
            source = str(path) if is_saved_data_set(path) else self.name
            self._data = open_arrow(self.name, source, None, "train", streaming=True)
            if position is not None:
                self._data.load_state_dict(position["state"])
            self._rows = iter(self._data)
        found: list[tuple[str, Any]] = []
        for row in self._rows:
            found.append((f"{self.name}, row {number + len(found) + 1}", row))
            if len(found) == rows:
                self._at = {"rows": number + rows, "state": self._data.state_dict()}
                return found, self._at
        self._rows = self._at = None
        return found, None

    def parse(self, raw: Any, place: str) -> Row:
        return dict(raw)

    def count(self) -> None:
        return None

    def identity(self) -> Any:
        return (self.name, None, "train")  # configuration and split of the library


RowReader = JSONLReader | ParquetReader | DatasetsReader
_FILES: dict[str, Any] = {".jsonl": JSONLReader, ".ndjson": JSONLReader, ".parquet": ParquetReader}


class RowStream:
    """An endless iterator over `(place, row)` of `sources`.

    With several ranks, rank r of w gets the rows whose running number, over all passes, is r modulo
    w: each row of a pass is given to one rank, and no rank runs ahead. All ranks read all blocks,
    and each parses its own rows alone.

    `sources` are JSONL and parquet files, folders of such, or ids of the `datasets` library, which
    streams them. Raises DataError, naming the row, for one that cannot be read, when it is read.
    Images of a row are stored when it is drawn (`row_images`).
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        buffer_rows: int = 10_000,
        shuffle: bool = True,
        seed: int = 0,
        image_folder: Path | None = None,
    ) -> None:
        """`image_folder`: what paths of images are relative to; None means the folder of each
        file."""
        if buffer_rows < 1:
            raise ConfigError(f"shuffle_buffer ({buffer_rows}) must be at least 1 row")
        self.readers: list[RowReader] = open_readers(sources)
        self.buffer_rows, self.shuffle, self.seed, self._image_folder = buffer_rows, shuffle, seed, image_folder
        self.taken = 0
        """Rows of all ranks so far: the running number of the next one."""
        self.pass_number = 0
        """The pass that the last row belongs to, from 0."""
        self._rank, self._world = 0, 1
        self._block: list[tuple[RowReader, str, Any]] = []
        self._order: Sequence[int] = ()
        self._offset = self._number = 0
        self._start: tuple[int, Any] = (0, None)
        self._next: tuple[int, Any] = (0, None)
        self._rows_in_pass = 0
        self._digest = sha256(repr([reader.identity() for reader in self.readers]).encode()).hexdigest()[:16]

    def shard(self, rank: int, world: int) -> None:
        """Give the rows of rank `rank` of `world` from now on."""
        self._rank, self._world = rank, world

    def __iter__(self) -> RowStream:
        return self

    def __next__(self) -> tuple[str, Row]:
        while True:
            if self._offset == len(self._block):
                self._fill()
            reader, place, raw = self._block[self._order[self._offset]]
            number = self.taken
            self._offset += 1
            self.taken += 1
            if number % self._world == self._rank:
                return place, self._parse(reader, raw, place)

    def _parse(self, reader: RowReader, raw: Any, place: str) -> Row:
        return intern_row(reader.parse(raw, place), self._image_folder or reader.folder, place)

    def first(self, rows: int) -> list[tuple[str, Row]]:
        """At most `rows` rows of one pass, in the order of the files. Changes no state."""
        found, _ = self._read(range(len(self.readers)), (0, None), rows)
        return [(place, self._parse(reader, raw, place)) for reader, place, raw in found]

    def count_rows(self) -> int | None:
        """Rows in a pass; None if a source cannot tell without being read. Files are read through
        once, line by line."""
        counts = [reader.count() for reader in self.readers]
        return None if None in counts else sum(count for count in counts if count is not None)

    def _fill(self) -> None:
        self._start = self._next
        order: Sequence[int] = range(len(self.readers))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.pass_number]).permutation(len(self.readers)).tolist()
        self._block, self._next = self._read(order, self._start, self.buffer_rows)
        if not self._block:
            if not self._rows_in_pass:
                raise DataError(f"there are no rows in {', '.join(reader.name for reader in self.readers)}")
            self.pass_number, self._number, self._rows_in_pass, self._next = self.pass_number + 1, 0, 0, (0, None)
            self._fill()
            return
        count = len(self._block)
        rng = np.random.default_rng([self.seed, self.pass_number, self._number])
        self._order = rng.permutation(count).tolist() if self.shuffle else range(count)
        self._offset = 0
        self._number += 1
        self._rows_in_pass += count

    def _read(
        self, order: Sequence[int], start: tuple[int, Any], rows: int
    ) -> tuple[list[tuple[RowReader, str, Any]], tuple[int, Any]]:
        """Up to `rows` rows from `start` on, and where the next ones begin: (number of the file in
        `order`, position in it). No rows: the pass is at its end."""
        block: list[tuple[RowReader, str, Any]] = []
        file, position = start
        while file < len(order) and len(block) < rows:
            reader = self.readers[order[file]]
            found, position = reader.read(position, rows - len(block))
            block += [(reader, place, raw) for place, raw in found]
            if position is None:
                file += 1
        return block, (file, position)

    def state_dict(self) -> dict[str, Any]:
        """Where the present block begins, the offset in it, and what that is valid for."""
        return {
            **self._identity(),
            "pass": self.pass_number,
            "block": self._number - 1 if self._block else self._number,
            "start": list(self._start if self._block else self._next),
            "offset": self._offset,
            "taken": self.taken,
            "rows_before": self._rows_in_pass - len(self._block),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`. Raises ConfigError if the files or the settings
        differ, since the rows would."""
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise ConfigError(f"the saved position has {name}={state.get(name)}, not {own}; put it back, or start a new run")
        file, position = state["start"]
        self.pass_number, self._number, self.taken = int(state["pass"]), int(state["block"]), int(state["taken"])
        self._rows_in_pass, self._next, self._block, self._offset = int(state["rows_before"]), (int(file), position), [], 0
        if state["offset"]:
            self._fill()
            self._offset = int(state["offset"])

    def _identity(self) -> dict[str, Any]:
        settings = {"shuffle_buffer": self.buffer_rows, "shuffle": self.shuffle, "seed": self.seed, "world_size": self._world}
        return {"data": self._digest, **settings}
