"""`GatheredBatches`: a source for each rank, and all ranks get the samples of all.

    rank 0  samples 32 answers ... waits    gathers 32 + 32 answers, trains its part of them
    rank 1  samples 32 answers of its own   gathers 32 + 32 answers, trains its part of them

The trainer then divides each mini-batch over the ranks (`rank_plans`). Without it every rank trains
what it sampled, and all wait for the one with the longest answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ludic.errors import ConfigError, DataError
from ludic.forwarding import forward_members
from ludic.training import ranks
from ludic.training.batching.batch_columns import decode_columns, encode_columns
from ludic.training.batching.joined_batches import join_batches
from ludic.training.batching.mini_batches import unit_key
from ludic.training.batching.source import OPTIONAL_MEMBERS, BatchSourceBase, as_batch_source
from ludic.training.ranks.collectives import broadcast_bytes, group_device
from ludic.training.ranks.sent_errors import describe_error, rebuild_error
from ludic.training.types import BatchSource, SAWBatch

logger = logging.getLogger(__name__)

Parts = tuple[bytes | memoryview, bytes | memoryview]
"""A batch as `encode_columns` returns it."""
_OWN = ("divided_by_trainer", "shards_across_ranks", "unshard")


@forward_members("_inner", [name for name in OPTIONAL_MEMBERS if name not in _OWN])
class GatheredBatches(BatchSourceBase):
    """Gives all ranks the samples of every rank's own source, those of rank 0 first.

    >>> source = GatheredBatches(RolloutBatchSource(..., shards_across_ranks=True))
    >>> await Trainer(batch_source=source, ...).train(100)

    All ranks make one, with a source of other samples on each. Groups, pairs and rollouts need
    names that no other rank uses, as uuids are. About 9 bytes a token, the texts and the metadata
    of all samples travel to every rank, which then has what was sent: numbers in 32 bits,
    metadata are what msgpack gives back. In the meta of the batch, counts are added up, and means
    and deviations are those of all samples.

    The ranks wait for each other at the store, until the deadline of the watchdog's phase. The
    error of one rank's source, the end of its data, and its interruption (a RankError on the
    others) are raised on all once each has come; the batches that others have got are lost. Each
    rank saves the position of its own source, so that a run resumes on as many ranks as it had.
    With one rank it is `inner`. Raises ConfigError for a source that gives all ranks the same
    samples, and warns of one that does not say (`shards_across_ranks`).
    """

    divided_by_trainer = True
    shards_across_ranks = True

    def __init__(self, inner: BatchSource) -> None:
        self._inner = as_batch_source(inner)
        if ranks.is_distributed() and self._inner.shards_across_ranks is False:
            raise ConfigError(
                f"{type(inner).__name__} gives all ranks the same samples, so that each would be trained {ranks.world_size()} times; "
                "use SharedBatches, or give each rank samples of its own and set shards_across_ranks=True"
            )
        if ranks.is_distributed() and self._inner.shards_across_ranks is None and ranks.rank() == 0:
            logger.warning(
                "%s does not say whether each of the %d ranks gets its own samples; if all get the same, each is trained %d times. Set "
                "shards_across_ranks = True on it if ranks get different samples, else use SharedBatches",
                type(inner).__name__,
                ranks.world_size(),
                ranks.world_size(),
            )

    async def next_batch(self) -> SAWBatch:
        """The next batches of all ranks' sources, as one batch."""
        if not ranks.is_distributed():
            return await self._inner.next_batch()
        parts: Parts | None = None
        failure: BaseException | None = None
        try:
            parts = encode_columns(await self._inner.next_batch())
        except BaseException as error:  # the others wait for this rank, even if it is interrupted: they learn of it below
            failure = error
        device = group_device()  # here, since a thread has a current device of its own
        if self.overlaps:  # the event loop generates the next batch meanwhile
            everyone = await asyncio.to_thread(_exchange, parts, failure, device)
        else:
            everyone = _exchange(parts, failure, device)
        batches = [decode_columns(*each) for each in everyone]
        _check_names(batches)
        return join_batches(batches)


def _exchange(parts: Parts | None, failure: BaseException | None, device: Any) -> list[Parts]:
    """The parts of every rank. Raises this rank's `failure`, else that of the first that has
    one."""
    ranks.barrier()  # a wait at the store: one rank may sample for longer than a collective may take
    sent: dict[str, Any] = {"sizes": [len(part) for part in parts or ()]}
    if failure is not None:
        sent = {"error": describe_error(failure, rank=ranks.rank())}
    heads = ranks.gather_json(sent, device)
    if failure is not None:
        raise failure
    for head in heads:
        if "error" in head:
            raise rebuild_error(head["error"])
    return [_broadcast_parts(parts, head["sizes"], rank, device) for rank, head in enumerate(heads)]


def _broadcast_parts(parts: Parts | None, sizes: Sequence[int], rank: int, device: Any) -> Parts:
    own = parts if rank == ranks.rank() and parts is not None else (None, None)
    head, table = (broadcast_bytes(part, size, device, src=rank) for part, size in zip(own, sizes, strict=True))
    return head, table


def _check_names(batches: Sequence[SAWBatch]) -> None:
    """Raise DataError if a group or a pair is on two ranks: what is computed of a group, and which
    two samples are a pair, follows from its name."""
    ranks_of: dict[tuple[str, Any], int] = {}
    for rank, batch in enumerate(batches):
        for kind, name in dict.fromkeys(unit_key(item, row) for row, item in enumerate(batch.items)):
            if kind in ("group", "pair") and ranks_of.setdefault((kind, name), rank) != rank:
                raise DataError(
                    f"the {kind} {name!r} is on the ranks {ranks_of[kind, name]} and {rank}; give each rank's source other names, "
                    "for example with the rank in them, or other samples"
                )
