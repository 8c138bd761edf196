"""Batches of samples that are made while training, from rows that are larger than memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ludic.data.formats import Row
from ludic.data.row_stream import RowStream
from ludic.errors import ConfigError, check_value
from ludic.training import ranks
from ludic.training.batching.epochs import batch_meta
from ludic.training.batching.source import BatchSourceBase
from ludic.training.types import SAWBatch, SAWItem

BARREN_ROWS = 100_000
"""Consecutive rows without a sample after which the stream is given up."""


class StreamedBatchSource(BatchSourceBase):
    """Returns batches of the samples of a `RowStream`, without end.

    A batch has `batch_size` samples, which may come from two passes. Several samples of a row
    stay in order. The state is the place in the stream and the number of samples of the last row
    that were returned; `counts` are part of it.

    Example: rows of 2, 0 and 3 samples in batches of 2 are the batches a1 a2, c1 c2, and c3 with
    the first of the next pass.
    """

    shards_across_ranks = True

    def __init__(
        self,
        rows: RowStream,
        make: Callable[[Row, str], list[SAWItem]],
        *,
        batch_size: int,
        count: Callable[[SAWItem], Mapping[str, int]] | None = None,
        name: str = "stream",
    ) -> None:
        """`make`: the samples of a row, with its place; none: the row is left out. `count`: what to
        add to `counts` for a sample that is returned."""
        check_value("batch_size", batch_size, above=0)
        self.rows, self.batch_size = rows, batch_size
        self.counts: Counter[str] = Counter()
        """Sums over all samples that were returned."""
        self._make, self._count, self._name = make, count, name
        self._pending: list[SAWItem] = []
        """The samples of the last row that are left."""
        self._before: dict[str, Any] = {}
        """The state of the stream before the last row."""
        self._returned = 0
        """Samples of the last row that were returned."""
        rows.shard(ranks.rank(), ranks.world_size())

    def unshard(self) -> None:
        """Return the batches of one process from now on."""
        self.rows.shard(0, 1)
        self.shards_across_ranks = False

    async def next_batch(self) -> SAWBatch:
        """The next batch. Raises DataError, naming the row, for a row that makes no sample."""
        items = [self._take() for _ in range(self.batch_size)]
        return SAWBatch(items, batch_meta(items, epoch=self.rows.pass_number, source=self._name))

    def _take(self) -> SAWItem:
        barren = 0
        while not self._pending:
            if barren > BARREN_ROWS:
                raise ConfigError(f"{barren:,} rows of the stream in a row make no sample; are all of them held out?")
            self._before, self._returned = self.rows.state_dict(), 0
            place, row = next(self.rows)
            self._pending = self._make(row, place)
            barren += 1
        self._returned += 1
        item = self._pending.pop(0)
        if self._count is not None:
            self.counts.update(self._count(item))
        return item

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, and the counts."""
        counts = dict(self.counts)
        if self._pending:
            return {"rows": self._before, "returned": self._returned, "counts": counts}
        return {"rows": self.rows.state_dict(), "returned": 0, "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`. Raises ConfigError if data or settings differ."""
        if "rows" not in state:
            raise ConfigError("the checkpoint is of a run without streaming; resume it with streaming=false, or begin a new run")
        self.rows.load_state_dict(state["rows"])
        self._pending, self._returned, self.counts = [], 0, Counter(state["counts"])
        if state["returned"]:
            self._before = self.rows.state_dict()
            place, row = next(self.rows)
            self._pending = self._make(row, place)[int(state["returned"]) :]
            self._returned = int(state["returned"])
