"""Rows of data sets that are larger than memory: read in blocks, shuffled in each, pass after pass.

A block is `buffer_rows` consecutive rows; only one is in memory. The order of the files in a pass
follows from the seed and the number of the pass, the order of the rows in a block from those and
the number of the block. So the place where the block begins and the offset in it are the whole
state, and a resumed run reads that block again and goes on.

    files in the order of the pass   [b.jsonl | a.jsonl]
    blocks of 4 rows                 b1 b2 b3 a1 | a2 a3
    rows                             b3 a1 b1 b2 | a3 a2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from ludic.data.formats import Row
from ludic.data.row_readers import RowReader, open_readers
from ludic.errors import ConfigError, DataError


class RowStream:
    """An endless iterator over `(place, row)` of `sources`.

    With several ranks, rank r of w gets the rows whose running number, over all passes, is r modulo
    w: each row of a pass is given to one rank, and no rank runs ahead. All ranks read all blocks,
    and each parses its own rows alone.

    `sources` are JSONL and parquet files, folders of such, or ids of the `datasets` library, which
    streams them. Raises DataError, naming the row, for one that cannot be read, when it is read.
    """

    def __init__(self, sources: Sequence[str], *, buffer_rows: int = 10_000, shuffle: bool = True, seed: int = 0) -> None:
        if buffer_rows < 1:
            raise ConfigError(f"shuffle_buffer ({buffer_rows}) must be at least 1 row")
        self.readers: list[RowReader] = open_readers(sources)
        self.buffer_rows, self.shuffle, self.seed = buffer_rows, shuffle, seed
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
                return place, reader.parse(raw, place)

    def first(self, rows: int) -> list[tuple[str, Row]]:
        """At most `rows` rows of one pass, in the order of the files. Changes no state."""
        found, _ = self._read(range(len(self.readers)), (0, None), rows)
        return [(place, reader.parse(raw, place)) for reader, place, raw in found]

    def count_rows(self) -> int | None:
        """Rows in a pass; None if a source cannot tell without being read. Files are read through
        once, line by line."""
        counts = [reader.count() for reader in self.readers]
        return None if None in counts else sum(count for count in counts if count is not None)

    def _fill(self) -> None:
        """Read the next block."""
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
                raise ConfigError(
                    f"the saved position in the stream belongs to {name}={state.get(name)}, here it is {own}: the rows would differ from "
                    "the run that is resumed; put the data back and use the same settings, or start a new run"
                )
        file, position = state["start"]
        self.pass_number, self._number, self.taken = int(state["pass"]), int(state["block"]), int(state["taken"])
        self._rows_in_pass, self._next, self._block, self._offset = int(state["rows_before"]), (int(file), position), [], 0
        if state["offset"]:
            self._fill()
            self._offset = int(state["offset"])

    def _identity(self) -> dict[str, Any]:
        settings = {"shuffle_buffer": self.buffer_rows, "shuffle": self.shuffle, "seed": self.seed, "world_size": self._world}
        return {"data": self._digest, **settings}
