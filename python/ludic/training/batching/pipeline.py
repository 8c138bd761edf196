"""Actors and a trainer in processes of their own, which meet at a Redis server.

    actor   requests_fn -> engine, credit -> samples of a group --+
    actor   ...                                                   +--> queue --> PipelineBatchSource
    actor   ...                                                 --+

Each actor chooses its own prompts and assigns credit itself. A run that must be the same whatever
dies gives out numbered prompts instead: `training.queue.source`.

    # actor.py, as often as there are machines
    asyncio.run(run_pipeline_actor(engine, requests_fn, credit_assigner, url, client=client))

    # trainer.py
    Trainer(batch_source=PipelineBatchSource(url, batch_size=64), ...).train_sync(100)
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ludic.columns import mean_or_zero
from ludic.errors import QueueDataLost, QueueError, QueueRefused, RequestsExhausted, check_value
from ludic.event_loop import await_if_needed
from ludic.inference.client import VersionedClient
from ludic.training.batching.source import BatchSourceBase
from ludic.training.queue.base import Entry, GroupLog
from ludic.training.queue.entries import EntryError, SampleGroup, decode_samples, encode_samples, split_groups
from ludic.training.queue.opening import QueueRetryPolicy, make_owner_name, open_server_queue
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.rollouts.episodes import SampleCheck
from ludic.training.types import CreditAssigner, RequestsFn, SAWBatch, SAWItem

logger = logging.getLogger(__name__)

RUN = "pipeline"
"""The run that owns the queue. It is the same for all trainers: a restarted one replaces the one
before it immediately."""
CLAIM_S = 3600.0
DEFAULT_KEEP = 4096
"""How many trained groups are kept for a restart."""
WAIT_LOG_S = 60.0
DEFAULT_MAX_ENTRIES = 64
"""How many groups wait for the trainer before actors wait."""
RETRY_S = 1.0
FULL_S = 0.2
"""Pauses of an actor: after an error, and while the queue is full."""


@dataclass(eq=False)
class _Read:
    """An entry that was read and is not forgotten."""

    position: str
    items: list[SAWItem] | None
    """Its samples, while they wait for a batch; None once they are in one, and for an entry that is
    no group or came before."""
    producer: str = ""
    sequence: int = 0


class PipelineBatchSource(BatchSourceBase):
    """Batches of the samples that `run_pipeline_actor` sends, in the order in which they were sent.

    A batch has the whole groups that come first, as many as make `batch_size` samples or more.
    `poll_timeout`: how many seconds one call of the server waits for samples.

    **Resuming.** The state is the position after the last trained group, and the last entry of each
    actor. Groups stay in the queue until a checkpoint has them (`checkpoint_saved`), so that a
    resumed run trains what came after its checkpoint, each group once. At most `keep` trained
    groups stay, in addition to the groups of the last batch; the oldest are forgotten with a
    warning.

    **Failures.** An entry that is no group of samples is set aside in the queue with its reason,
    and logged. If the server loses its data, the groups in it are lost, and actors go on.
    QueueError if the server cannot be reached for `patience_s` seconds, or no group comes for
    `wait_s`. OwnershipLost if another source reads the queue: one queue has one trainer, and with
    several ranks one of them reads it.

    `redis_url`: as for `queue.redis.RedisLog`; if empty, LUDIC_QUEUE_URL. Raises ImportError that
    names the extra if redis is not installed. `log`: a queue that takes the server's place.
    """

    shards_across_ranks = False

    def __init__(
        self,
        redis_url: str,
        queue_key: str = "ludic_queue",
        batch_size: int = 4,
        poll_timeout: float = 1,
        *,
        keep: int = DEFAULT_KEEP,
        patience_s: float = 300.0,
        wait_s: float = 3600.0,
        log: GroupLog | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("poll_timeout", poll_timeout), ("keep", keep), ("wait_s", wait_s)):
            check_value(name, value, above=0)
        self._log = open_server_queue(redis_url, queue_key) if log is None else log
        self._queue_key, self._batch_size, self._poll_timeout, self._keep = queue_key, batch_size, poll_timeout, keep
        self._patience, self._wait_s = QueueRetryPolicy(patience_s), wait_s
        self._owner = make_owner_name()
        self._check: SampleCheck | None = None
        self._claimed = False
        self._before: str | None = None
        """Position before `_entries`."""
        self._entries: deque[_Read] = deque()
        """All entries that were read and are not forgotten, in order."""
        self._waiting: deque[_Read] = deque()
        """Of these, the ones whose samples wait for a batch."""
        self._trained: dict[str, int] = {}
        """Producer -> its last entry in a batch. Actors send their entries one after another, so
        all before it came before it, or were lost."""
        self._newest: dict[str, int] = {}
        """Producer -> its last entry in a batch or waiting for one."""
        self._announced = -1
        """How many trained groups the actors believe to be in the queue."""
        self._saved: str | None = None
        """Position in the last `state_dict`."""
        self._warned = False
        self._duplicates = self._aside = 0

    async def next_batch(self) -> SAWBatch:
        """The next batch; waits until its groups have come."""
        clock = self._patience.clock
        started = came = warned = clock()
        while sum(len(entry.items or ()) for entry in self._waiting) < self._batch_size:
            if await self._receive():
                came = warned = clock()
            elif clock() - came >= self._wait_s:
                raise QueueError(f"no samples came to the queue {self._queue_key!r} for {self._wait_s:g} s; are actors running?")
            elif clock() - warned >= WAIT_LOG_S:
                logger.warning("no samples came to the queue %r for %.0f s", self._queue_key, clock() - came)
                warned = clock()
        stats = await self._call("reading the queue's numbers", self._log.stats)
        samples = accumulate(len(entry.items or ()) for entry in self._waiting)
        groups = 1 + sum(count < self._batch_size for count in samples)
        measured = {
            "queue/wait_s": clock() - started,
            "queue/depth": max(0, stats.entries - self._count_done(groups)),
            "queue/bytes": stats.bytes,
            "queue/aside": self._aside,
            "queue/duplicates": self._duplicates,
        }
        await self._keep_few(groups)
        await self._announce_done(groups)
        # No wait from here on: one that is cancelled would leave samples that count as trained.
        items: list[SAWItem] = []
        for _ in range(groups):
            entry = self._waiting.popleft()
            items += entry.items or ()
            entry.items = None
            self._trained[entry.producer] = entry.sequence
        batch = _to_batch(items)
        batch.meta |= measured
        return batch

    def use_check(self, check: SampleCheck) -> bool:
        self._check = check
        return True

    def state_dict(self) -> dict[str, Any]:
        """Position and ledger, as plain JSON values."""
        done = self._count_done()
        self._saved = self._entries[done - 1].position if done else self._before
        return {"position": self._saved, "producers": dict(self._trained)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._before = state["position"]
        self._trained = {str(producer): int(last) for producer, last in state["producers"].items()}
        self._newest = dict(self._trained)
        self._entries.clear()
        self._waiting.clear()

    async def checkpoint_saved(self) -> None:
        """Forget the groups that a run resumed from the last `state_dict` does not read. A
        checkpoint with it is on disk, and verified. Tries once: a save must not wait for a server
        that cannot be reached. A source that has read nothing does not own the queue, and leaves
        this to a later checkpoint."""
        if (saved := self._saved) is None or not self._claimed:
            return
        try:
            with suppress(QueueDataLost):  # nothing is there to forget
                await self._patience.run(lambda: self._log.forget(self._owner, saved))
            self._drop_through(saved)
            if (done := self._count_done()) != self._announced:
                await self._patience.run(lambda: self._log.announce(self._owner, done))
                self._announced = done
        except QueueError as error:
            logger.warning("trained groups stay in the queue %r until the next checkpoint: %s", self._queue_key, error)

    async def aclose(self) -> None:
        """Close the connections. Actors go on until the queue is full."""
        await asyncio.to_thread(self._log.disconnect)

    async def _own(self) -> None:
        """Make sure that this source owns the queue. Raises OwnershipLost if another one does."""
        if self._claimed:
            try:
                await self._call("reading the queue", lambda: self._log.renew_claim(self._owner, ttl_s=CLAIM_S))
                return
            except QueueDataLost:
                logger.warning("the queue %r has lost its data; samples that were in it are gone", self._queue_key)
                self._entries = deque(self._waiting)
        await self._call("claiming the queue", lambda: self._log.claim(self._owner, run=RUN, ttl_s=CLAIM_S))
        self._claimed, self._announced = True, -1
        await self._announce_done()

    async def _receive(self) -> bool:
        """Read entries. Returns whether there were any."""
        await self._own()
        after = self._entries[-1].position if self._entries else self._before
        entries = await self._call("reading samples", lambda: self._log.read(after, timeout_s=self._poll_timeout))
        for entry in entries:
            await self._accept(entry)
        return bool(entries)

    async def _accept(self, entry: Entry) -> None:
        read = _Read(entry.position, None)
        try:
            group = await asyncio.to_thread(decode_samples, entry.payload, check=self._check)
        except EntryError as error:
            reason = str(error)
            logger.warning("an entry of the queue %r was set aside: %s", self._queue_key, reason)
            await self._call("setting an entry aside", lambda: self._log.set_aside(entry, reason))
            self._aside += 1
        else:
            if group.sequence > self._newest.get(group.producer, -1):
                self._newest[group.producer] = group.sequence
                read = _Read(entry.position, group.items, group.producer, group.sequence)
                self._waiting.append(read)
            else:
                self._duplicates += 1
        self._entries.append(read)

    def _count_done(self, groups: int = 0) -> int:
        """How many entries come before the first one that waits, once the next `groups` are in a
        batch."""
        return self._entries.index(self._waiting[groups]) if len(self._waiting) > groups else len(self._entries)

    async def _keep_few(self, groups: int) -> None:
        """Forget groups beyond `keep` once the next `groups` are in a batch, but none of these."""
        surplus = min(self._count_done(groups) - self._keep, self._count_done())
        if surplus <= 0:
            return
        if self._saved is not None and not self._warned:
            self._warned = True
            logger.warning(
                "the queue %r holds more than %d trained groups (keep); the oldest are forgotten, and a resumed run does not train "
                "them. Save checkpoints more often, or raise keep",
                self._queue_key,
                self._keep,
            )
        position = self._entries[surplus - 1].position
        await self._own()
        with suppress(QueueDataLost):  # nothing is there to forget
            await self._call("forgetting samples", lambda: self._log.forget(self._owner, position))
        self._drop_through(position)

    def _drop_through(self, position: str) -> None:
        """Drop the entries up to this position, which the log has forgotten."""
        if any(entry.position == position for entry in self._entries):
            while self._before != position:
                self._before = self._entries.popleft().position

    async def _announce_done(self, groups: int = 0) -> None:
        """Tell the actors how many groups in the queue are trained once the next `groups` are, so
        that they wait for the others only. What numbered groups use for the policy version carries
        this number here."""
        done = self._count_done(groups)
        if done != self._announced:
            with suppress(QueueDataLost):
                await self._call("announcing the trained groups", lambda: self._log.announce(self._owner, done))
                self._announced = done

    async def _call(self, what: str, operation: Any) -> Any:
        return await self._patience.call(what, operation)


def _to_batch(items: Sequence[SAWItem]) -> SAWBatch:
    """The batch with its statistics. `target_rollouts` is the number of rollouts."""
    rewards = {item.meta.get("rollout_id", index): item.meta.get("total_reward", 0.0) for index, item in enumerate(items)}
    meta = {
        "target_rollouts": len(rewards),
        "num_samples": len(items),
        "avg_total_reward": mean_or_zero(list(rewards.values())),
        "source": "pipeline_redis",
    }
    for key in ("completion_length", "prompt_length"):
        lengths = [item.meta[key] for item in items if key in item.meta]
        if lengths:
            meta[f"avg_{key}"] = mean_or_zero(lengths)
    return SAWBatch(list(items), meta)


async def run_pipeline_actor(
    engine: RolloutEngine,
    requests_fn: RequestsFn,
    credit_assigner: CreditAssigner,
    redis_url: str,
    queue_key: str = "ludic_queue",
    max_steps: int = 10,
    concurrency: int = 4,
    client: VersionedClient | None = None,
    *,
    max_entries: int = DEFAULT_MAX_ENTRIES,
    log: GroupLog | None = None,
) -> None:
    """Play the requests of `requests_fn` and send the samples, until the task is cancelled or
    RequestsExhausted is raised.

    Each call of `requests_fn` is one batch for `credit_assigner`. Its samples are sent group by
    group, and tagged with the policy version that `client` had before they were sampled (0 without
    a client), where the sampler did not tag them more exactly. An error is logged, and the next
    requests are played after a second. Every played group is sent: while the queue is full or
    cannot be reached, the actor waits.

    `max_entries`: how many groups wait for the trainer before actors wait. Samples are that much
    older than the weights; `TrainerConfig.max_lag` drops the ones that are too old. `redis_url` and
    `log` are as for `PipelineBatchSource`.
    """
    check_value("max_entries", max_entries, least=1)
    sender = _Sender(open_server_queue(redis_url, queue_key) if log is None else log, max_entries)
    while True:
        try:
            requests = await await_if_needed(requests_fn())
            version = 0 if client is None else int(await await_if_needed(client.get_policy_version()))
            batch = await engine.generate_batch(
                requests=requests, max_steps=max_steps, credit_assigner=credit_assigner, concurrency=concurrency
            )
        except RequestsExhausted:
            logger.info("the actor has no more requests")
            return
        except Exception:
            logger.exception("the actor could not play; it goes on in %g s", RETRY_S)
            await asyncio.sleep(RETRY_S)
            continue
        for item in batch.items:
            if item.meta.get("policy_version") is None:
                item.meta["policy_version"] = version
        for items in split_groups(batch.items):
            await sender.send(items)
        await asyncio.sleep(0)  # an engine that never waits would keep others from running


class _Sender:
    """Sends the groups of one actor, each with the next number."""

    def __init__(self, log: GroupLog, max_entries: int) -> None:
        self._log, self._max_entries = log, max_entries
        self._producer, self._sequence = make_owner_name(), 0

    async def send(self, items: list[SAWItem]) -> None:
        """Return when the queue has the group. One that cannot be sent is logged and left out."""
        try:
            payload = await asyncio.to_thread(encode_samples, SampleGroup(self._producer, self._sequence, items))
        except EntryError as error:
            logger.error("a group of %d samples cannot be sent and is left out: %s", len(items), error)
            return
        while True:
            try:
                if await asyncio.to_thread(self._push, payload):
                    break
                await asyncio.sleep(FULL_S)
            except QueueRefused:
                raise
            except QueueError as error:
                logger.error("samples could not be sent: %s; trying again in %g s", error, RETRY_S)
                await asyncio.sleep(RETRY_S)
        self._sequence += 1

    def _push(self, payload: bytes) -> bool:
        # The announced version counts trained groups (`PipelineBatchSource._announce_done`).
        return self._log.push(payload, max_entries=self._max_entries + (self._log.version() or 0))
