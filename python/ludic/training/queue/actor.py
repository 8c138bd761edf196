"""The loop of a process that plays groups: lease one, play it, deliver it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludic.errors import DataError, RolloutError, check_value
from ludic.event_loop import is_being_cancelled
from ludic.training.queue.arrivals import Order, failed_group
from ludic.training.queue.base import DEFAULT_LEASE_S, GroupLog, Lease, Work
from ludic.training.queue.entries import DEFAULT_LIMITS, EntryLimits, Group, encode_group
from ludic.training.queue.opening import LONGEST_WAIT_S, QueueRetryPolicy
from ludic.training.rollouts.episodes import PlayedRollouts
from ludic.types import Rollout

logger = logging.getLogger(__name__)

Play = Callable[[Work], Awaitable[Sequence[Rollout]]]
"""Plays the group `work.number` with the weights of `work.version` and returns its rollouts; raises
RolloutError for a group that failed for good."""
StopFlag = asyncio.Event | threading.Event
WEIGHTS_S = 1.0
"""How long a lease waits for weights that do not exist yet."""
SHORTEST_POLL_S, LONGEST_POLL_S = 0.02, 0.1
"""How often an idle actor asks for work, and a waiting one for weights (`poll_after`)."""
LOOK_S = 0.5
"""How often an actor that plays looks whether it must stop."""


async def run_actor(
    log: GroupLog,
    *,
    play: Play,
    weights: Callable[[int], Awaitable[Any]],
    actor: str,
    stop: StopFlag | None = None,
    order: Order = "exact",
    lease_s: float = DEFAULT_LEASE_S,
    max_attempts: int = 3,
    patience_s: float = 300.0,
    limits: EntryLimits = DEFAULT_LIMITS,
    patience: QueueRetryPolicy | None = None,
) -> int:
    """Play groups until the trainer closes the log, or `stop` is set. Returns how many were
    delivered. `actor` is unique to the process.

    **Weights.** `weights(version)` makes the policy sample with that version, which was announced.
    With order `exact` it is the one of the work, with `arrival` the newest. A lease whose version
    is not announced within 1 s is given back: the trainer may need another group first, from the
    actor that waits.

    **Leases** are renewed every `lease_s / 3` seconds. A group whose lease is lost (somebody else
    took it, or it was delivered) is not played on. When the actor is cancelled or must stop, its
    group is given back immediately.

    **Failures.** An error of `weights` gives the group back, and the next try waits longer each
    time. An error of `play` is logged and the group played again, `max_attempts` times in all;
    RolloutError and DataError are final. A group that fails for good is delivered as one that
    failed, with its error, and so is one whose actors died `max_attempts` times: the trainer goes
    on without it. QueueError after `patience_s` seconds without the log.
    """
    check_value("lease_s", lease_s, above=0)
    loop = _Actor(log, play, weights, actor, order, lease_s, max_attempts, limits, patience or QueueRetryPolicy(patience_s))
    delivered, idle_since = 0, loop.patience.clock()
    while stop is None or not stop.is_set():
        lease: Lease | None = await loop.patience.call("leasing a group", lambda: log.lease(actor, lease_s=lease_s))
        if lease is not None:
            delivered += await loop.handle(lease, stop)
            idle_since = loop.patience.clock()
        elif await loop.patience.call("looking whether the queue is closed", log.is_closed):
            break
        else:
            await loop.patience.sleep(poll_after(loop.patience.clock() - idle_since))
    return delivered


def poll_after(waited_s: float) -> float:
    """Seconds until a wait that has lasted `waited_s` looks again: a fiftieth of it, so that what
    comes is seen after 1 % of the wait on average. Example: 0.02 s of a wait of 1 s."""
    return min(LONGEST_POLL_S, max(SHORTEST_POLL_S, waited_s / 50))


@dataclass
class _Actor:
    log: GroupLog
    play: Play
    weights: Callable[[int], Awaitable[Any]]
    name: str
    order: Order
    lease_s: float
    max_attempts: int
    limits: EntryLimits
    patience: QueueRetryPolicy
    failures_of_weights: int = 0

    async def handle(self, lease: Lease, stop: StopFlag | None) -> bool:
        """Play the leased group. Returns whether it was delivered."""
        renewing = asyncio.create_task(self._renew(lease))
        playing = asyncio.create_task(self._play(lease))
        try:
            while not playing.done() and not renewing.done() and not (stop is not None and stop.is_set()):
                await asyncio.wait({playing, renewing}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            group = playing.result() if playing.done() else None
            if group is not None:
                return await self._deliver(lease, group)
            if renewing.done():
                renewing.result()  # raises what ended it
                logger.warning("%s lost the lease of group %d", self.name, lease.work.number)
                return False
            await self._give_back(lease)
            return False
        except asyncio.CancelledError:
            await self._give_back(lease)
            raise
        finally:
            await _end(playing, renewing)

    async def _renew(self, lease: Lease) -> None:
        """Renew the lease until it is lost."""
        held = True
        while held:
            await self.patience.sleep(self.lease_s / 3)
            held = await self.patience.call("renewing a lease", lambda: self.log.renew(lease, lease_s=self.lease_s))

    async def _give_back(self, lease: Lease) -> None:
        await self.patience.call("giving a group back", lambda: self.log.give_back(lease))

    async def _deliver(self, lease: Lease, group: Group) -> bool:
        """Deliver the group; one that cannot be sent, as a group that failed."""
        try:
            payload = await self.patience.run(lambda: encode_group(group, self.limits))
        except DataError as error:
            logger.error("group %d cannot be delivered: %s", group.number, error)
            payload = encode_group(self._failed(lease, str(error)), self.limits)
        return await self.patience.call("delivering a group", lambda: self.log.deliver(lease, payload))

    async def _play(self, lease: Lease) -> Group | None:
        """The group; None if its weights do not exist, or cannot be loaded."""
        work = lease.work
        if work.attempt >= self.max_attempts:
            return self._failed(lease, f"its lease ran out {work.attempt} times: do its actors die of it?")
        version = await self._await_version(work.version)
        if version is None or not await self._load(version):
            return None
        started = time.perf_counter()
        work = replace(work, version=version)
        for attempt in range(1, self.max_attempts + 1):
            try:
                return Group.of_lease(replace(lease, work=work), await self.play(work), time.perf_counter() - started)
            except Exception as error:
                if is_being_cancelled():  # users' code turned the cancellation into another error
                    raise asyncio.CancelledError from error
                if isinstance(error, RolloutError | DataError) or attempt == self.max_attempts:
                    logger.error("group %d failed and is delivered as one that failed: %s", work.number, error)
                    return self._failed(
                        lease, f"{type(error).__name__}: {error}", error.played if isinstance(error, RolloutError) else None
                    )
                logger.warning("group %d failed; playing it again", work.number, exc_info=True)
                await self.patience.sleep(min(2.0**attempt, LONGEST_WAIT_S))
        return None

    async def _await_version(self, wanted: int) -> int | None:
        """The version to sample with; None if it is not announced in time."""
        began = self.patience.clock()
        while True:
            newest: int | None = await self.patience.call("reading the version", self.log.version)
            if newest is not None and newest >= wanted:
                return wanted if self.order == "exact" else newest
            waited_s = self.patience.clock() - began
            if waited_s >= WEIGHTS_S:
                return None
            await self.patience.sleep(poll_after(waited_s))

    async def _load(self, version: int) -> bool:
        """Load the weights. After an error, wait longer each time."""
        try:
            await self.weights(version)
        except Exception:
            if is_being_cancelled():
                raise
            self.failures_of_weights += 1
            logger.warning("%s cannot load the weights of version %d", self.name, version, exc_info=True)
            await self.patience.sleep(min(2.0**self.failures_of_weights, 60.0))
            return False
        self.failures_of_weights = 0
        return True

    def _failed(self, lease: Lease, error: str, played: object = None) -> Group:
        work = lease.work
        group = failed_group(lease.run, work.number, work.version, error, attempt=work.attempt, actor=self.name)
        return replace(group, played=played, ended_s=time.time()) if isinstance(played, PlayedRollouts) else group


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what runs, and wait until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
