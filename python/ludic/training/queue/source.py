"""The trainer's batch source for groups that other processes play.

    offer batches k .. k+ahead  ->  work     -> actors (actor.run_actor)
    batch k  <-  Arrivals       <-  entries  <-

Batch k is offered when batch `k - ahead` is requested, with the policy version that was announced
last. So a group is sampled with weights that are `ahead` steps old, as with `OverlappedSource`, and
at most `ahead + 1` batches are played at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ludic.errors import ConfigError, LudicError, QueueDataLost, QueueError, RolloutError, check_value, shorten_names
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.source import BatchSourceBase
from ludic.training.queue.arrivals import Arrivals, Order
from ludic.training.queue.base import DEFAULT_CLAIM_S, Entry, GroupLog, QueueStats, Work
from ludic.training.queue.entries import DEFAULT_LIMITS, EntryError, EntryLimits, Group, decode_group
from ludic.training.queue.opening import ClaimKeeper, QueueRetryPolicy, make_owner_name
from ludic.training.rollouts.engine import select_credit_assigner
from ludic.training.rollouts.episodes import PlayedRollouts, RolloutCounts, SampleCheck
from ludic.training.rollouts.log import RolloutLog, append_failures
from ludic.training.rollouts.to_samples import batch_from_played
from ludic.training.types import CreditAssigner, SampleFilter, SAWBatch

logger = logging.getLogger(__name__)

HEAL_AFTER_S = 5.0
"""After this time without an entry, missing groups are offered again."""


class QueueBatchSource(BatchSourceBase):
    """Batches of the groups that actors deliver to `log`. `to_batch` makes the batch of the groups,
    usually `BatchFromGroups`.

    **Order.** `exact` trains the groups by number: batch k is groups `kP .. kP+P-1`, P being
    `groups_per_batch`. A run is then the same whatever dies and when, if its actors sample the same
    for the same number and version. `arrival` trains what comes first, and no group later than
    `max_lag` versions after it was offered, by default `ahead + 2` (`arrivals`).

    **Resuming.** The state has the ledger of trained groups, the position in the log and the
    versions of the offered groups. Delivered groups are read again from the log, and others played.
    `checkpoint_saved` forgets what the checkpoint no longer needs.

    **Failures.** A group that failed, or that was refused `max_attempts` times, is missing in its
    batch; RolloutError if that leaves none. Refused entries are set aside with their reason. A
    group that is in no place where it should be is offered again (`heal`): at the start, after the
    log could not be reached, and after 5 s without an entry.

    **Deadlines.** QueueError after `patience_s` seconds in which the log could not be reached or no
    actor had work, and after `group_timeout_s` without any entry. OwnershipLost if another trainer
    claims the log: this one must then end with status 78, and with 75 after a QueueError.

    `publish_every`: versions are rounded down to its multiples. `num_batches`: how many
    batches the run has; groups beyond are not offered.
    """

    def __init__(
        self,
        log: GroupLog,
        *,
        run: str,
        groups_per_batch: int,
        to_batch: Callable[[Sequence[Group]], Awaitable[SAWBatch]],
        ahead: int = 0,
        order: Order = "exact",
        max_lag: int | None = None,
        publish_every: int = 1,
        num_batches: int | None = None,
        max_attempts: int = 3,
        patience_s: float = 300.0,
        group_timeout_s: float = 3600.0,
        claim_s: float = DEFAULT_CLAIM_S,
        limits: EntryLimits = DEFAULT_LIMITS,
        patience: QueueRetryPolicy | None = None,
    ) -> None:
        check_value("ahead", ahead, "0 offers each batch on request", least=0)
        if max_lag is not None and max_lag <= ahead:
            raise ConfigError(f"max_lag ({max_lag}) must be > ahead ({ahead}): groups are begun {ahead} versions early")
        check_value("publish_every", publish_every, least=1)
        self._log, self._run, self._to_batch = log, run, to_batch
        slack = 2 if max_lag is None else max_lag - ahead
        self._arrivals = Arrivals(groups_per_batch=groups_per_batch, order=order, slack=slack, max_attempts=max_attempts)
        self.max_lag = ahead
        self.overlaps = ahead > 0
        self._ahead, self._publish_every, self._num_batches = ahead, publish_every, num_batches
        self._group_timeout_s, self._claim_s = group_timeout_s, claim_s
        self._patience = QueueRetryPolicy(patience_s) if patience is None else patience
        self._call = self._patience.call
        self._reader = EntryReader(log, run, limits, self._patience)
        self.owner = make_owner_name()
        """Name under which this trainer claims the log."""
        self._claims: ClaimKeeper | None = None
        self._version = 0
        self._batch = 0
        """The next batch to return."""
        self._versions: dict[int, int] = {}
        """Batch -> the version that its groups are sampled with, for all that are offered."""
        self._in_log: dict[int, str] = {}
        """Group -> the position of its last entry that `heal` found and that is not taken."""
        self._healed_after = 0
        """Number of interruptions that were healed."""
        self._aside = 0
        self._saved_position: str | None = None

    # ---- what the trainer calls ----------------------------------------------------------------

    async def next_batch(self) -> SAWBatch:
        """The next batch, once its groups have come."""
        started = self._patience.clock()
        await self._reader.stop_reading_ahead()
        if self._claims is None:
            await self._start()
        await self._with_data(self._offer_ahead)
        groups = await self._collect()
        wait_s = self._patience.clock() - started
        if not any(group.played for group in groups):
            await self._give_up(groups)
        for group in groups:
            for rollout in group.played:
                rollout.meta.setdefault("policy_version", group.version)
        stats = await self._call("reading the queue's numbers", self._log.stats)
        measured = measure_queue(stats, self._arrivals, groups, wait_s=wait_s, aside=self._aside)
        batch = await self._to_batch(groups)
        # No wait from here on: one that is cancelled would leave a batch that counts as trained.
        self._arrivals.mark_trained([group.number for group in groups])
        self._batch += 1
        first = min(self._batch, self._arrivals.ledger.watermark // self._arrivals.groups_per_batch)
        self._versions = {batch: version for batch, version in self._versions.items() if batch >= first}
        batch.meta.update(measured)
        if self.overlaps:
            self._reader.read_ahead(lambda: self._arrivals.position, self._arrivals.groups_per_batch)
        return batch

    def use_check(self, check: SampleCheck) -> bool:
        self._reader.check = check
        return True

    async def announce(self, version: int) -> None:
        """Say that actors can sample with the weights of `version`; the publisher calls this.
        Before the first batch is requested, it is only noted."""
        self._version = version - version % self._publish_every
        if self._claims is not None:
            await self._with_data(self._announce)

    def limit(self, num_batches: int) -> None:
        """Set how many more batches the run needs."""
        self._num_batches = num_batches + self._batch

    def state_dict(self) -> dict[str, Any]:
        """Ledger, position and versions, as plain JSON values."""
        arrivals = self._arrivals.state_dict()
        self._saved_position = arrivals["position"]
        return {
            "run": self._run,
            "groups_per_batch": self._arrivals.groups_per_batch,
            "batch": self._batch,
            **arrivals,
            "version": self._version,
            "versions": sorted(self._versions.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError if it belongs to another kind of source, or to
        another number of groups in a batch."""
        if "ledger" not in state:
            raise ConfigError("the checkpoint has no ledger of groups: it was saved by a run without actors; resume it without")
        size = self._arrivals.groups_per_batch
        if state["groups_per_batch"] != size:
            raise ConfigError(f"the checkpoint has {state['groups_per_batch']} groups in a batch, here are {size}; use as many")
        self._arrivals.load_state_dict(state)
        self._reader.clear()
        self._batch, self._version = int(state["batch"]), int(state["version"])
        self._versions = {int(batch): int(version) for batch, version in state["versions"]}

    async def checkpoint_saved(self) -> None:
        """Forget the entries that a run resumed from the last `state_dict` does not read."""
        if self._claims is not None:
            await self._forget(self._saved_position)

    async def close_queue(self) -> None:
        """The run is done: the log is emptied, and actors end."""
        if self._claims is None:
            await self._start()
        await self._with_data(lambda: self._call("closing the queue", lambda: self._log.close(self.owner)))
        await self.aclose()

    async def aclose(self) -> None:
        """Stop reading, and renewing the claim. Actors go on with the offered groups."""
        await self._reader.stop_reading_ahead()
        if self._claims is not None:
            self._claims.stop()
            self._claims = None

    # ---- offering ------------------------------------------------------------------------------

    async def _start(self) -> None:
        await self._claim()
        await self._with_data(self.heal)
        self._claims = ClaimKeeper(self._log, self.owner, self._claim_s)

    async def _claim(self) -> None:
        await self._call("claiming the queue", lambda: self._log.claim(self.owner, run=self._run, ttl_s=self._claim_s))

    async def _with_data(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        """Run `operation`; where the log's data are gone, claim it, offer the missing groups and
        run it again."""
        is_lost = False
        for _ in range(3):
            try:
                if is_lost:
                    await self._claim()
                    await self.heal()
                return await operation()
            except QueueDataLost as error:
                logger.warning("%s", error)
                is_lost = True
        raise QueueError("the data of the queue were lost three times in a row; check the memory and the disk of its server")

    async def heal(self) -> int:
        """Withdraw groups that are not needed, and offer every group that is expected and is in no
        place: neither trained nor come, nor in the log behind the position, nor outstanding.
        Returns the number of groups that were offered.

        Actors take the smallest number first. One that was trained would keep them from all others:
        the weights it asks for may be deleted."""
        self._healed_after = self._patience.interruptions
        await self._announce()
        work = [each.work for each in await self._call("reading the work", self._log.outstanding)]
        needless = [each.number for each in work if not self._is_needed(each.number)]
        if needless:
            logger.info("%d groups need no playing and are withdrawn, the first is %d", len(needless), needless[0])
            await self._call("withdrawing groups", lambda: self._log.withdraw(self.owner, needless))
        # Read after the work: a group that is delivered between the two is in both.
        self._in_log = await self._reader.scan(self._arrivals.position)
        size = self._arrivals.groups_per_batch
        # Work of another version than is expected now is missing: `offer` replaces it.
        outstanding = {each.number for each in work if self._versions.get(each.number // size) in (None, each.version)}
        missing = [number for number in self._expected() if number not in outstanding and number not in self._in_log]
        await self._offer(missing)
        if missing:
            logger.info("%d groups were missing in the queue and are offered again, the first is %d", len(missing), missing[0])
        return len(missing)

    def _is_needed(self, number: int) -> bool:
        """Whether the group, which is outstanding, is to be played: it has not come, and its batch
        is offered or will be with the next one. Groups of later batches come from a trainer that
        was further than its checkpoint; they are offered again in their turn."""
        batch = number // self._arrivals.groups_per_batch
        return not self._arrivals.has(number) and (batch in self._versions or batch <= self._batch + self._ahead)

    def _expected(self) -> list[int]:
        """The groups that are offered and have not come."""
        size = self._arrivals.groups_per_batch
        end = (max(self._versions) + 1) * size if self._versions else 0
        missing = self._arrivals.ledger.list_missing(end)
        return [number for number in missing if number // size in self._versions and not self._arrivals.has(number)]

    async def _announce(self) -> None:
        version = self._version
        await self._call("announcing weights", lambda: self._log.announce(self.owner, version))

    async def _offer_ahead(self) -> None:
        """Offer the batches up to `ahead` beyond the next one that are not offered yet, without the
        groups that a resumed run finds in the log."""
        end = self._batch + self._ahead + 1
        end = end if self._num_batches is None else max(self._batch + 1, min(end, self._num_batches))
        batches = [batch for batch in range(self._batch, end) if batch not in self._versions]
        size = self._arrivals.groups_per_batch
        numbers = [number for batch in batches for number in range(batch * size, (batch + 1) * size)]
        versions = self._versions | dict.fromkeys(batches, self._version)
        await self._offer([number for number in numbers if not (self._arrivals.has(number) or number in self._in_log)], versions)
        self._versions = versions

    async def _offer(self, numbers: Sequence[int], versions: Mapping[int, int] | None = None) -> None:
        versions = self._versions if versions is None else versions
        size = self._arrivals.groups_per_batch
        work = [Work(number, versions[number // size], self._arrivals.attempts(number)) for number in numbers]
        if work:
            await self._call("offering groups", lambda: self._log.offer(self.owner, work))

    # ---- collecting ----------------------------------------------------------------------------

    async def _collect(self) -> list[Group]:
        """The groups of the next batch, once they have come."""
        clock = self._patience.clock
        came = seen = healed = clock()  # the last entry, the last sign of an actor, the last healing
        while (groups := self._arrivals.find_batch(self._batch)) is None:
            if self._claims is not None:
                self._claims.check()
            if self._reader.entries:
                await self._take_next()
                continue
            await self._reader.read(self._arrivals.position)
            now = clock()
            if self._reader.entries:
                came = seen = healed = now
                continue
            self._arrivals.reach_end()
            if now - healed >= HEAL_AFTER_S or self._healed_after != self._patience.interruptions:
                await self._with_data(self.heal)
                healed = clock()
                if (await self._call("reading the queue's numbers", self._log.stats)).leased:
                    seen = healed
                what = f"batch {self._batch} waits for groups {shorten_names(self._expected())}"
                if healed - seen >= self._patience.patience_s:
                    raise QueueError(f"{what}: no actor has had work for {healed - seen:.0f} s (patience_s); are actors running?")
                if healed - came >= self._group_timeout_s:
                    raise QueueError(f"{what}: actors have work, none was delivered for {healed - came:.0f} s (group_timeout_s)")
        return groups

    async def _give_up(self, groups: Sequence[Group]) -> NoReturn:
        """End a run whose next batch has no rollouts. What was taken is forgotten: a resumed run
        has it played again, and does not read the same failures."""
        await self._forget(self._arrivals.position)
        first = next((failure.error for group in groups for failure in group.played.failures), "no reason is known")
        raise RolloutError(f"all {len(groups)} groups of batch {self._batch} failed; mend the first error and resume: {first}")

    async def _forget(self, through: str | None) -> None:
        """Forget the entries up to this position. Tries once: a run that ends must not wait for a
        log that cannot be reached, and another one forgets them with the next checkpoint."""
        if through is not None:
            try:
                await self._patience.run(lambda: self._log.forget(self.owner, through))
            except QueueError as error:
                logger.warning("groups that are not needed stay in the queue until the next checkpoint: %s", error)

    async def _take_next(self) -> None:
        """Take the oldest entry that was read."""
        entry, group = self._reader.entries[0]
        if isinstance(group, EntryError):
            await self._refuse_next(str(group))
            return
        self._pop_entry()
        version = self._versions.get(group.number // self._arrivals.groups_per_batch)
        if self._arrivals.order == "exact" and version not in (None, group.version):
            logger.warning("group %d was sampled with version %d, and %d is expected", group.number, group.version, version)
            self._arrivals.take(entry, None)
            await self._offer_again(group.number)
        else:
            self._arrivals.take(entry, group)

    def _pop_entry(self) -> None:
        entry, _ = self._reader.entries.popleft()
        if entry.number is not None and self._in_log.get(entry.number) == entry.position:
            del self._in_log[entry.number]

    async def _refuse_next(self, reason: str) -> None:
        """Set the oldest entry that was read aside, and offer its group again. If this is
        cancelled, the entry is still there."""
        entry, _ = self._reader.entries[0]
        logger.warning("the entry of group %s was set aside: %s", entry.number, reason)
        await self._call("setting an entry aside", lambda: self._log.set_aside(entry, reason))
        self._pop_entry()
        self._aside += 1
        if self._arrivals.refuse(entry, reason):
            logger.error("group %s is given up; its batch goes on without it: %s", entry.number, reason)
        elif entry.number is not None:
            await self._offer_again(entry.number)

    async def _offer_again(self, number: int) -> None:
        """Offer a group that was refused, unless it has come or the log has a later entry of it: a
        trainer that went back to a checkpoint meets both."""
        if number // self._arrivals.groups_per_batch not in self._versions or self._arrivals.has(number):
            return
        if number not in await self._reader.scan(self._arrivals.position):
            await self._with_data(lambda: self._offer([number]))


READ_S = 1.0
"""How long one reading of the log waits for an entry."""
POLL_S = 0.2
"""How often the log is looked at while the trainer computes."""


class EntryReader:
    """The entries that are read and not taken, each with its group or the reason to refuse it."""

    def __init__(self, log: GroupLog, run: str, limits: EntryLimits, patience: QueueRetryPolicy) -> None:
        self._log, self._run, self._limits, self._patience = log, run, limits, patience
        self.entries: deque[tuple[Entry, Group | EntryError]] = deque()
        self._ahead: asyncio.Task[None] | None = None
        self.check: SampleCheck | None = None
        """The trainer's, once it has requested a batch."""

    def last_position(self, taken: str | None) -> str | None:
        """The position of the last entry that was read; `taken` is the position of the last one
        taken."""
        return self.entries[-1][0].position if self.entries else taken

    async def read(self, taken: str | None, timeout_s: float = READ_S) -> None:
        """Read the next entries, and wait up to `timeout_s` seconds for the first. Where this is
        cancelled, nothing is read."""
        after = self.last_position(taken)
        self.entries.extend(await self._patience.call("reading groups", lambda: self._read(after, timeout_s)))

    async def scan(self, taken: str | None) -> dict[int, str]:
        """The groups of all entries that are not taken, each with the position of its last entry.
        The entries read for it are not kept."""
        positions = {entry.number: entry.position for entry, _ in self.entries if entry.number is not None}
        position = self.last_position(taken)
        while entries := await self._patience.call("reading groups", partial(self._log.read, position)):
            positions |= {entry.number: entry.position for entry in entries if entry.number is not None}
            position = entries[-1].position
        return positions

    def clear(self) -> None:
        """Forget what was read, and stop reading ahead."""
        self.entries.clear()
        if self._ahead is not None:
            self._ahead.cancel()

    def read_ahead(self, taken: Callable[[], str | None], count: int) -> None:
        """Begin to read until `count` entries are there."""
        self._ahead = asyncio.create_task(self._read_ahead(taken, count))

    async def stop_reading_ahead(self) -> None:
        """Keep what was read. An error is raised by the next `read`, if it lasts."""
        task, self._ahead = self._ahead, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _read_ahead(self, taken: Callable[[], str | None], count: int) -> None:
        try:
            while len(self.entries) < count:
                await self.read(taken(), timeout_s=0.0)
                await self._patience.sleep(POLL_S)
        except LudicError as error:
            logger.info("reading ahead ended: %s", error)

    def _read(self, after: str | None, timeout_s: float) -> list[tuple[Entry, Group | EntryError]]:
        """Read and decode; runs in a thread."""
        return [(entry, self._decode(entry)) for entry in self._log.read(after, timeout_s=timeout_s)]

    def _decode(self, entry: Entry) -> Group | EntryError:
        try:
            group = decode_group(entry.payload, self._limits, self.check)
        except EntryError as error:
            return error
        if group.number != entry.number:
            return EntryError(f"the entry of group {entry.number} holds group {group.number}")
        if group.run != self._run:
            return EntryError(f"the entry is of run {group.run}, this is {self._run}")
        return group


def measure_queue(
    stats: QueueStats, arrivals: Arrivals, groups: Sequence[Group], *, wait_s: float, aside: int
) -> dict[str, float]:
    """The statistics for the meta of the batch of `groups`, which are still among `arrivals`.

    `wait_s`: how long the trainer waited for them. `aside`: entries that this trainer set aside.
    """
    ended = [group.ended_s for group in groups if group.ended_s]
    return {
        "generation_s": max((group.generation_s for group in groups), default=0.0),
        "queue/depth": len(arrivals) - len(groups),
        "queue/outstanding": stats.outstanding,
        "queue/oldest_s": stats.oldest_s,
        "queue/age_s": max(0.0, time.time() - min(ended)) if ended else 0.0,
        "queue/wait_s": wait_s,
        "queue/claimed": stats.claimed,
        "queue/duplicates": arrivals.duplicates,
        "queue/aside": aside,
        "queue/abandoned": arrivals.abandoned,
        "queue/bytes": stats.bytes,
    }


class BatchFromGroups:
    """Assigns credit over all groups of a batch, filters the samples, and writes the rollouts to
    `log`, and the failed episodes to `failures_path`. Credit comes from `credit_assigner`, or else
    from `algorithm`.

    `rollouts_per_group`: how many a whole group has. It is what a failed group counts as in
    `target_rollouts`.
    """

    def __init__(
        self,
        *,
        rollouts_per_group: int,
        algorithm: RLAlgorithm | None = None,
        credit_assigner: CreditAssigner | None = None,
        sample_filter: SampleFilter | None = None,
        log: RolloutLog | None = None,
        failures_path: Path | None = None,
    ) -> None:
        self._rollouts_per_group = rollouts_per_group
        self._credit_assigner = select_credit_assigner(algorithm, credit_assigner)
        self._sample_filter = sample_filter
        self._log, self._failures_path = log, failures_path
        self.batches = 0
        """Number of batches so far."""

    async def __call__(self, groups: Sequence[Group]) -> SAWBatch:
        """The batch of the groups; at least one has rollouts."""
        number, played = self.batches, join_groups(groups, self._rollouts_per_group)
        self.batches += 1
        if self._failures_path is not None:
            append_failures(self._failures_path, played.failures)
        batch = batch_from_played(played, self._credit_assigner, self._sample_filter)
        if self._log is not None:
            await asyncio.to_thread(self._log.write, number, played)
        return batch


def join_groups(groups: Sequence[Group], rollouts_per_group: int) -> PlayedRollouts:
    """The rollouts of all groups as one call of the engine returns them.

    Example: a group of 4 rollouts and one that failed, with 4 in a group, are 4 of 8 requested.
    """
    counts = RolloutCounts()
    for group in groups:
        counts += group.played.counts
    return PlayedRollouts(
        [rollout for group in groups for rollout in group.played],
        counts,
        [failure for group in groups for failure in group.played.failures],
        num_requested=sum(group.played.num_requested or rollouts_per_group for group in groups),
    )
