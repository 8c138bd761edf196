"""An actor of `PipelineBatchSource`: plays, assigns credit, and sends the samples of each group."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from ludic.errors import ConfigError, QueueError, QueueRefused, RequestsExhausted
from ludic.event_loop import await_if_needed
from ludic.training.queue.base import GroupLog
from ludic.training.queue.entries import EntryError, SampleGroup, encode_samples, split_groups
from ludic.training.queue.opening import make_owner_name, open_server_queue
from ludic.training.types import CreditAssigner, RequestsFn, SAWBatch, SAWItem

logger = logging.getLogger(__name__)

DEFAULT_MAX_ENTRIES = 64
"""How many groups wait for the trainer before actors wait."""
RETRY_S = 1.0
FULL_S = 0.2
"""Pauses of an actor: after an error, and while the queue is full."""


class SampleEngine(Protocol):
    """What an actor needs of a `RolloutEngine`."""

    async def generate_batch(
        self, *, requests: Any, max_steps: int, credit_assigner: CreditAssigner, concurrency: int
    ) -> SAWBatch: ...


class VersionedClient(Protocol):
    """What an actor needs of a chat client."""

    async def get_policy_version(self) -> int: ...


async def run_pipeline_actor(
    engine: SampleEngine,
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
    if max_entries < 1:
        raise ConfigError(f"max_entries ({max_entries}) must be >= 1")
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
