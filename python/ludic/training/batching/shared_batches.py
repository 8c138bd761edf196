"""`SharedBatches`: one source for all ranks. Rank 0 asks it, and all ranks get the same batch.

    rank 0      next_batch of the source ... post "a batch of 27 MB"   broadcast
    the others  wait at the store ......................... read it    broadcast

The wait is not a collective, since generation may take longer than the group's timeout. The trainer
then divides each mini-batch over the ranks (`rank_plans`).

`GatheredBatches`: a source for each rank, and all ranks get the samples of all.

    rank 0  samples 32 answers ... waits    gathers 32 + 32 answers, trains its part of them
    rank 1  samples 32 answers of its own   gathers 32 + 32 answers, trains its part of them

The trainer then divides each mini-batch over the ranks (`rank_plans`). Without it every rank trains
what it sampled, and all wait for the one with the longest answers.

`sample_codec` makes the bytes of a batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

from ludic.errors import ConfigError, DataError, StopRequested, check_value
from ludic.training import ranks
from ludic.training.batching.mini_batches import unit_key
from ludic.training.batching.sample_codec import decode_batch, encode_batch
from ludic.training.batching.source import OPTIONAL_MEMBERS, PENDING_PATIENCE_S, BatchSourceBase, as_batch_source
from ludic.training.ranks.collectives import broadcast_bytes, group_device
from ludic.training.ranks.rendezvous import describe_error, rebuild_error
from ludic.training.rollouts.episodes import SampleCheck
from ludic.training.rollouts.to_samples import ENVIRONMENTS
from ludic.training.types import BatchSource, SAWBatch
from ludic.user_objects import forward_members

logger = logging.getLogger(__name__)

BATCH_PATIENCE_S = 3600.0
"""How long a rank waits for rank 0 to get a batch."""
STOP_TICK_S = 0.5
"""How often rank 0 looks for a stop while a batch is generated."""
FINISH_GRACE_S = 60.0
"""How much longer than rank 0 the others wait for its pending batches."""


class SharedBatches(BatchSourceBase):
    """Gives all ranks the batches of rank 0's source.

    >>> source = SharedBatches(RolloutBatchSource(...))  # on every rank
    >>> await Trainer(batch_source=source, ...).train(100)

    All ranks make one, in the same order, and call the same methods. Only rank 0's `inner` is used;
    on other ranks it may be None. A source that divides its samples among the ranks is made to
    return all of them (`unshard`), so that a run on N ranks trains the batches of a run on one.
    With one rank it is `inner`.

    Every rank, rank 0 too, gets what was sent: sequences are arrays, metadata are what msgpack
    gives back. An error of the source is raised on all ranks: as the same type where it can be
    built from a message, else as its nearest base class. A batch of rank 0 that does not come
    within `patience_s` is a RankError on the others. If `stop` is true on any rank before a batch
    is requested, that request raises StopRequested on all, as a stop of the run does. A batch that
    takes longer than `stop_patience_s` after a stop is not finished: the other ranks, and a
    launcher that kills what does not end, wait for it. A resumed run generates it again.

    The state is the state of rank 0's source, so that a run resumes on any number of ranks.
    """

    divided_by_trainer = True
    shards_across_ranks = False

    def __init__(
        self,
        inner: BatchSource | None,
        *,
        stop: Callable[[], object] | None = None,
        patience_s: float = BATCH_PATIENCE_S,
        stop_patience_s: float | None = None,
    ) -> None:
        check_value("patience_s", patience_s, above=0)
        self._source = None if inner is None else as_batch_source(inner)
        self._stop, self._patience_s, self._stop_patience_s = stop, patience_s, stop_patience_s
        facts = ranks.ask_rank_0("preparing the batch source of all ranks", self._prepare)
        self.overlaps, self.max_lag, self.pairs_incomplete = facts
        self._meeting = ranks.current_rendezvous()
        """None for one process."""
        self._topic = "" if self._meeting is None else self._meeting.open_topic()

    def _prepare(self) -> list[Any]:
        """The members of rank 0's source that all ranks must agree on."""
        self._inner.unshard()
        return [self._inner.overlaps, self._inner.max_lag, self._inner.pairs_incomplete]

    @property
    def _inner(self) -> BatchSourceBase:
        if self._source is None:
            raise ConfigError("rank 0 asks the batch source for all ranks, and it has none; pass it as inner")
        return self._source

    async def next_batch(self) -> SAWBatch:
        """The next batch of rank 0's source."""
        if self._meeting is None:
            self._check_stop()
            return await self._inner.next_batch()
        if ranks.rank() > 0:
            message = await self._meeting.read(self._topic, "batch", self._patience_s, while_waiting=self._report_stop)
            head, table = [await self._broadcast(None, int(size)) for size in message["sizes"]]
            return decode_batch(head, table)
        try:
            self._check_stop()
            parts = encode_batch(await self._generate())
        except BaseException as error:  # also if this rank is interrupted: the others would wait for it
            with suppress(RuntimeError):  # of the store; the error itself matters more
                self._meeting.post_error(self._topic, error)
            raise
        self._meeting.post(self._topic, "batch", sizes=[len(part) for part in parts])
        head, table = [await self._broadcast(part, len(part)) for part in parts]
        return decode_batch(head, table)

    async def _generate(self) -> SAWBatch:
        """The next batch of `inner`, unless a stop was requested and it takes too long."""
        if self._stop_patience_s is None:
            return await self._inner.next_batch()
        batch = asyncio.ensure_future(self._inner.next_batch())
        stopped_at: float | None = None
        try:
            while not batch.done():
                await asyncio.wait([batch], timeout=STOP_TICK_S)
                stopped_at = time.monotonic() if stopped_at is None and self._is_stop_requested() else stopped_at
                if stopped_at is not None and time.monotonic() - stopped_at > self._stop_patience_s:
                    break
        finally:
            if not batch.done():
                batch.cancel()
                await asyncio.wait([batch])
        if batch.cancelled():
            raise StopRequested(f"the run was asked to stop, and a batch was not generated within {self._stop_patience_s:g} s")
        return batch.result()

    async def _broadcast(self, content: bytes | None, size: int) -> memoryview:
        """The bytes of rank 0. In a thread where the event loop generates the next batches."""
        device = group_device()  # here, since a thread has a current device of its own
        if self.overlaps:
            return await asyncio.to_thread(broadcast_bytes, content, size, device)
        return broadcast_bytes(content, size, device)

    def _check_stop(self) -> None:
        if self._stop is None:
            return
        if self._stop() or self._is_stop_requested():
            raise StopRequested("the run was asked to stop")

    def _is_stop_requested(self) -> bool:
        """Whether a rank has told all others."""
        return self._meeting is not None and self._meeting.requested_stop() is not None

    def _report_stop(self) -> None:
        """Tell rank 0, which may be about to ask for the next batch."""
        if self._meeting is not None and self._stop is not None and self._stop():
            self._meeting.request_stop(signal.SIGTERM)

    def use_check(self, check: SampleCheck) -> bool:
        return self._source is not None and self._source.use_check(check)

    def state_dict(self) -> dict[str, Any] | None:
        """The state of the source on rank 0; None on other ranks."""
        return self._inner.state_dict() if ranks.rank() == 0 else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`, on rank 0."""
        if ranks.rank() == 0:
            self._inner.load_state_dict(state)

    async def finish_pending(self, timeout_s: float = PENDING_PATIENCE_S) -> None:
        """Wait until rank 0's source has finished what runs in the background."""
        if ranks.rank() != 0:
            assert self._meeting is not None
            await self._meeting.read(self._topic, "finished", timeout_s + FINISH_GRACE_S)
            return
        try:
            await self._inner.finish_pending(timeout_s)
        except BaseException as error:
            if self._meeting is not None:
                with suppress(RuntimeError):
                    self._meeting.post_error(self._topic, error)
            raise
        if self._meeting is not None:
            self._meeting.post(self._topic, "finished")

    async def checkpoint_saved(self) -> None:
        """Tell rank 0's source."""
        if ranks.rank() == 0:
            await self._inner.checkpoint_saved()

    async def aclose(self) -> None:
        """Stop the background work of rank 0's source. Waits for no rank."""
        if ranks.rank() == 0:
            await self._inner.aclose()


Parts = tuple[bytes | memoryview, bytes | memoryview]
"""A batch as `encode_batch` returns it."""
_OWN = ("divided_by_trainer", "shards_across_ranks", "unshard")


@forward_members("_inner", [name for name in OPTIONAL_MEMBERS if name not in _OWN])
class GatheredBatches(BatchSourceBase):
    """Gives all ranks the samples of every rank's own source, rank 0's first.

    >>> source = GatheredBatches(RolloutBatchSource(..., shards_across_ranks=True))
    >>> await Trainer(batch_source=source, ...).train(100)

    All ranks make one, with a source of other samples on each. Groups, pairs and rollouts need
    names that no other rank uses, as uuids are. About 9 bytes a token, the texts and the metadata
    of all samples travel to every rank; metadata become values of msgpack. In the meta of the
    batch, counts are added up, and means and deviations are over all samples.

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
            raise ConfigError(f"{type(inner).__name__} gives all {ranks.world_size()} ranks the same samples; use SharedBatches")
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
            parts = encode_batch(await self._inner.next_batch())
        except BaseException as error:  # the others wait for this rank, even if it is interrupted: they learn of it below
            failure = error
        device = group_device()  # here, since a thread has a current device of its own
        if self.overlaps:  # the event loop generates the next batch meanwhile
            everyone = await asyncio.to_thread(_exchange, parts, failure, device)
        else:
            everyone = _exchange(parts, failure, device)
        batches = [decode_batch(*each) for each in everyone]
        _check_names(batches)
        return join_batches(batches)


def _exchange(parts: Parts | None, failure: BaseException | None, device: Any) -> list[Parts]:
    """The parts of every rank. Raises this rank's `failure`, else the first rank's that has one."""
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
    everyone: list[Parts] = []
    for rank, sizes in enumerate(head["sizes"] for head in heads):
        own = parts if rank == ranks.rank() and parts is not None else (None, None)
        head, table = (broadcast_bytes(part, size, device, src=rank) for part, size in zip(own, sizes, strict=True))
        everyone.append((head, table))
    return everyone


def _check_names(batches: Sequence[SAWBatch]) -> None:
    """Raise DataError if a group or a pair is on two ranks: its name decides which samples are
    normalised together or form a pair."""
    ranks_of: dict[tuple[str, Any], int] = {}
    for rank, batch in enumerate(batches):
        for kind, name in dict.fromkeys(unit_key(item, row) for row, item in enumerate(batch.items)):
            if kind in ("group", "pair") and ranks_of.setdefault((kind, name), rank) != rank:
                raise DataError(f"the {kind} {name!r} is on ranks {ranks_of[kind, name]} and {rank}; give each rank other names")


_ADDED = ("target_rollouts", "played_rollouts", "batch_size", "seed/without_plain")
"""Counts, in addition to all whose names begin with `num_`."""
_LARGEST = ("generation_s", "queue/", "actors/", "groups/")
_MEAN_REWARD, _DEVIATION = "avg_total_reward", "reward_std"
_OF_ROLLOUTS = (_MEAN_REWARD, "zvp_filter_frac", "frac_reward_zero_std")
"""Means over rollouts."""
_OF_SAMPLES = ("avg_completion_length", "avg_prompt_length")
"""Means over samples."""


def join_batches(batches: Sequence[SAWBatch]) -> SAWBatch:
    """The samples of `batches`, in their order. In the meta, counts are added up; means, and the
    deviation of the reward, are over all samples or rollouts and are left out if a batch with
    samples lacks them; of times and of numbers of a queue the largest is taken, of anything else
    the first.

    Example: 3 rollouts with a mean reward of 1.0 and 1 with 0.0 have a mean of 0.75.
    """
    items = [item for batch in batches for item in batch.items]
    keys = dict.fromkeys(key for batch in batches for key in batch.meta)
    meta = {key: value for key in keys if (value := _join(key, batches)) is not None}
    return SAWBatch(items, meta)


def _join(key: str, batches: Sequence[SAWBatch]) -> Any:
    """The value of the joined batch; None if it has none."""
    values = [batch.meta[key] for batch in batches if key in batch.meta]
    if key in _ADDED or key.startswith("num_"):
        return sum(values)
    if key == ENVIRONMENTS:
        return {name: _add_facts([each[name] for each in values if name in each]) for each in values for name in each}
    if key.startswith(_LARGEST):
        return max(values)
    if key in (*_OF_ROLLOUTS, *_OF_SAMPLES, _DEVIATION):
        filled = [batch for batch in batches if _weight(key, batch)]  # rollouts may have made no sample
        if not all(key in batch.meta for batch in filled):
            return None
        if key == _DEVIATION:
            return _join_deviation(filled)
        return _mean([batch.meta[key] for batch in filled], [_weight(key, batch) for batch in filled])
    return values[0]


def _add_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one environment (`environment_facts`)."""
    return {key: reduce(operator.add, [each[key] for each in facts]) for key in facts[0]}


def _weight(key: str, batch: SAWBatch) -> float:
    """How many values the mean `key` is over."""
    if key in _OF_SAMPLES:
        return float(len(batch.items))
    return float(batch.meta.get("played_rollouts", batch.meta.get("target_rollouts", len(batch.items))))


def _join_deviation(batches: Sequence[SAWBatch]) -> float | None:
    """The population standard deviation of the rewards of all rollouts.

    Example: rewards [1, 1, 1] and [0] have deviations 0 and 0 and means 1 and 0. All have the mean
    0.75 and the deviation sqrt((3 * 0.25**2 + 0.75**2) / 4) = 0.433.
    """
    if not all(_MEAN_REWARD in batch.meta for batch in batches):
        return None
    weights = [_weight(_DEVIATION, batch) for batch in batches]
    means = [batch.meta[_MEAN_REWARD] for batch in batches]
    mean = _mean(means, weights)
    squares = [batch.meta[_DEVIATION] ** 2 + (own - mean) ** 2 for batch, own in zip(batches, means, strict=True)]
    return math.sqrt(_mean(squares, weights))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = math.fsum(weights)
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
