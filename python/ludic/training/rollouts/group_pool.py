"""Keeps more groups in the air than a batch needs, and gives a batch as soon as enough are done.

    prompts --take--> owed --play--> whole --accept--> arrived --select--> batch
                       ^                        |
                       +---- next prompt <------+ rejected (or lost: a member failed too often)

With N groups a batch and a factor f, `ceil(N * f)` groups are kept: the slow ones run on while
batches of faster ones are trained. Nothing is thrown away, and nothing is trained more than
`max_lag` batches after it was admitted: `batch_selection` has the rule. The pool knows neither
prompts nor members.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from ludic.errors import ConfigError, RequestsExhausted, RolloutAborted, RolloutError, check_value
from ludic.event_loop import describe_error
from ludic.training.rollouts.batch_selection import ArrivalOrder, SubmissionOrder, choose_max_lag
from ludic.training.rollouts.group_ledger import (
    Group as Group,
    GroupBatch as GroupBatch,
    GroupState,
    Ledger,
    MemberCodec,
    PoolCounts as PoolCounts,
    Prompts,
    find_prompts,
    read_state,
)
from ludic.training.rollouts.member_calls import MemberCalls, MemberInterrupted as MemberInterrupted, Ticket as Ticket

logger = logging.getLogger(__name__)

ORDERS = ("arrival", "submission")
ON_EXHAUSTED = ("error", "short")


class GroupPool:
    """Plays groups of `members_per_group` members and gives batches of `groups_per_batch` groups.

    >>> async with GroupPool(play=play, accept=accept, prompts=prompts, ...) as pool:
    ...     batch = await pool.next_batch()

    `play(ticket)` samples and rewards one member; `accept(group)` judges a whole group, and should
    return fast. A pool is used in one event loop of asyncio.

    **Admission.** `ceil(groups_per_batch * over_sampling_factor)` groups are kept, arrived ones
    included. A group that is rejected or lost is replaced immediately. The groups that replace the
    groups of a batch are admitted when the next batch is requested, and thus begin with its
    weights; sooner only as far as they can leave within `max_lag` of the batch before. Calls start
    in the order of ordinals, at most `max_concurrency` at the same time.

    **Hand-over.** `order="arrival"`: first come, first served, and nothing later than `max_lag`
    batches after its admission (default: ceil(factor - 1), the least that is possible).
    `order="submission"`: always the lowest ordinals, so that the batches do not depend on timing; a
    batch then waits for its slowest group.

    **Failures.** A call that raises is repeated with the same seed up to `max_retries` times, while
    its siblings go on; one that was interrupted after progress has not failed. After that the group
    is lost: counted and logged, and never a reward of 0. While no call succeeds at all, calls are
    repeated after growing waits for up to `outage_patience_s` before a group is lost
    (`member_calls`). Twice as many losses as groups are kept, and no whole group in between, are a
    RolloutError. After more than `patience * groups_per_batch` rejections for one batch,
    `on_exhausted="error"` raises RolloutError with the reasons that `explain(group)` gives; "short"
    gives a batch of the groups that are left. When the prompts end, so does the pool: a short
    batch, then RequestsExhausted.

    **Life.** Inside `async with` calls go on between batches. Outside, `next_batch` ends the calls
    that it has started. Whole members stay in their groups either way, and the next call goes on
    with them. Calls that ignore their cancellation for `close_timeout_s` are given up.

    `codec` turns members into JSON values for `state_dict`. `prompts_in_state`: for prompts without
    `at`, which must be JSON values then.
    """

    def __init__(
        self,
        *,
        play: Callable[[Ticket], Awaitable[Any]],
        accept: Callable[[Group], bool],
        prompts: Prompts,
        groups_per_batch: int,
        members_per_group: int,
        over_sampling_factor: float = 1.0,
        max_lag: int | None = None,
        order: str = "arrival",
        max_retries: int = 1,
        max_concurrency: int | None = None,
        patience: int = 10,
        outage_patience_s: float = 15.0,
        on_exhausted: str = "error",
        seed: int = 0,
        close_timeout_s: float = 30.0,
        codec: MemberCodec | None = None,
        explain: Callable[[Group], str] | None = None,
        prompts_in_state: bool = False,
    ) -> None:
        for name, value, least in (
            ("groups_per_batch", groups_per_batch, 1),
            ("members_per_group", members_per_group, 1),
            ("patience", patience, 1),
            ("max_concurrency", max_concurrency, 1),
            ("max_retries", max_retries, 0),
        ):
            check_value(name, value, least=least, optional=True)
        check_value("close_timeout_s", close_timeout_s, above=0)
        check_value("outage_patience_s", outage_patience_s, least=0, below=math.inf)
        check_value("order", order, choices=ORDERS)
        check_value("on_exhausted", on_exhausted, choices=ON_EXHAUSTED)
        self._lag = choose_max_lag(over_sampling_factor, max_lag)
        self._max_kept = math.ceil(groups_per_batch * over_sampling_factor - 1e-9)  # 10 * 1.1 is 11.000000000000002
        self._groups_per_batch, self._members_per_group, self._order = groups_per_batch, members_per_group, order
        self._is_short_allowed, self._close_timeout_s = on_exhausted == "short", close_timeout_s
        self._accept, self._explain, self._codec = accept, explain, codec or MemberCodec()
        self._prompts, self._prompts_in_state = prompts, prompts_in_state
        self._calls = MemberCalls(
            play,
            fill=self._fill,
            lose=self._lose,
            retry=self._count_retry,
            fail=self._fail,
            max_retries=max_retries,
            max_concurrency=max_concurrency,
            seed=seed,
            outage_patience_s=outage_patience_s,
        )
        self.ledger, self._selection = Ledger(members_per_group), self._make_selection()
        self._failures = FailureCounter(max_rejections=patience * groups_per_batch, max_losses=2 * self._max_kept)
        self.num_batches = 0
        """How many batches the pool has given."""
        self._batches_left: int | None = None
        self._counts_before = PoolCounts()
        """The counts when the last batch was given."""
        self._failure: Exception | None = None  # of the prompts or the filter, for whoever asks for a batch
        self._prompts_ended = self._is_entered = self._is_waiting = self._is_aborted = self._is_cut_off = False
        self._changed: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        """Done when the present `next_batch` has ended."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def max_lag(self) -> int:
        """How many batches after its admission a group is given at the latest."""
        return self._lag

    @property
    def counts(self) -> PoolCounts:
        """The groups admitted so far, by what became of them."""
        return self.ledger.count()

    def limit(self, num_batches: int) -> None:
        """Say how many more batches are needed. No more groups are admitted than they hold, unless
        more batches are requested after all."""
        self._batches_left = num_batches

    async def __aenter__(self) -> GroupPool:
        self._is_entered, self._is_aborted = True, False
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all calls. A batch that is awaited elsewhere is RolloutAborted."""
        self._is_entered = False
        self._cut_off_wait()
        await self._calls.stop(self._close_timeout_s)
        if self._ended is not None:
            await asyncio.wait([self._ended])

    async def next_batch(self) -> GroupBatch:
        """The next batch. Raises RequestsExhausted after the last one, RolloutAborted after
        `request_abort`, and RolloutError if groups are lost or rejected one after another. An error
        loses no group: the next call goes on."""
        if self._is_waiting:
            raise RuntimeError("a pool of groups gives one batch at a time; await the first call of next_batch before the second")
        self._is_waiting, self._is_cut_off = True, False
        try:
            self._loop = asyncio.get_running_loop()
            self._ended = self._loop.create_future()
            try:
                await self._wait_until_complete()
            finally:
                if not self._is_entered:
                    await self._calls.stop(self._close_timeout_s)
            return self._give()  # the last step: a cancellation after it would lose the batch
        finally:
            self._is_waiting = False
            if self._ended is not None:
                self._ended.set_result(None)
                self._ended = None
            if self._is_entered:
                asyncio.get_running_loop().call_soon(self._admit_more)

    def request_abort(self) -> None:
        """Cancel all calls. The batch that is awaited, or else the next one, is RolloutAborted,
        until `resume` or the next `async with`. Whole members stay. May be called from any thread
        and from a signal handler."""
        self._is_aborted = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nothing runs
                self._loop.call_soon_threadsafe(self._abort)

    def resume(self) -> None:
        """Go on after `request_abort`, with the next batch that is requested."""
        self._is_aborted = False

    def state_dict(self) -> dict[str, Any]:
        """The kept groups with their members, and the counts, as JSON values. Right at any moment;
        the position of the prompts must be read in the same step of the event loop."""
        arrivals = self._selection.list_arrivals()
        return {"batch": self.num_batches, **self.ledger.encode(self._codec, arrivals, with_prompts=self._prompts_in_state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Groups that are owed are completed with their seeds and by their
        deadlines. The prompts must be at their saved position already. Raises ConfigError, and
        changes nothing, while calls run, and for a state that is damaged or does not fit."""
        if self._calls.is_open:
            raise ConfigError("the pool is playing groups; leave it (`async with`) before you set its state")
        ledger, arrivals = read_state(state, self._codec, self._members_per_group, with_prompts=self._prompts_in_state)
        selection = self._make_selection()
        for group in ledger.owed():
            selection.admit(group)
        for group in arrivals:
            ledger.arrive(group)
            selection.arrive(group)
        if not self._prompts_in_state:
            find_prompts(ledger, self._prompts)
        self.ledger, self._selection, self.num_batches = ledger, selection, state["batch"]
        self._counts_before, self._failure, self._prompts_ended = ledger.count(), None, False
        self._failures.reset()

    async def _wait_until_complete(self) -> None:
        assert self._loop is not None
        if not self._is_aborted:
            await self._open()
        while True:
            if self._is_aborted or self._is_cut_off:
                await self._calls.stop(self._close_timeout_s)
                asked = "asked to abort" if self._is_aborted else "left while a batch was awaited"
                remedy = "resume()" if self._is_aborted else "the next batch"
                raise RolloutAborted(f"the pool was {asked}; whole members are kept, and {remedy} goes on with them")
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._is_complete():
                return  # and it stays complete: groups that arrive or leave ask for no more of the others
            if self._failures.is_losing or (
                self._failures.is_out_of_patience and not (self._is_short_allowed and len(self.ledger))
            ):
                error = self._failures.make_error()
                self._failures.reset()
                self._calls.outage.forget()
                raise error
            if not len(self.ledger):
                raise RequestsExhausted("there are no more prompts, and every group is given, rejected or lost")
            self._changed = self._loop.create_future()
            try:
                await self._changed
            finally:
                self._changed = None

    async def _open(self) -> None:
        """Let calls run, owed groups first, and repeat calls that raised between batches."""
        self._failure = None
        if not self._calls.is_open:
            await self._calls.stop(self._close_timeout_s)  # those that an abort has cancelled
            if self._is_cut_off:
                return
            self._calls.open()
            for group in self.ledger.owed():
                self._calls.add(group)
        for group in [group for group in self.ledger.owed() if not group.missing]:
            self._judge(group)  # the filter has raised
        self._admit_more()

    def _abort(self) -> None:
        if self._is_aborted:  # else `resume` was faster
            self._calls.cancel()
            self._cut_off_wait()

    def _cut_off_wait(self) -> None:
        """Let the present `next_batch`, if any, raise RolloutAborted."""
        self._is_cut_off = True
        self._wake()

    def _is_complete(self) -> bool:
        size = self._batch_size()
        return size > 0 and self._selection.is_complete(self.num_batches, size)

    def _batch_size(self) -> int:
        """N, or the remaining groups if no more are admitted."""
        is_last = self._prompts_ended or (self._is_short_allowed and self._failures.is_out_of_patience)
        return min(self._groups_per_batch, len(self.ledger)) if is_last else self._groups_per_batch

    def _give(self) -> GroupBatch:
        groups = self._selection.take(self.num_batches, self._batch_size())
        for group in groups:
            self.ledger.remove(group, GroupState.GIVEN)
        counts = self.ledger.count()
        batch = GroupBatch(groups, self.num_batches, counts, self._counts_before)
        self.num_batches += 1
        self._batches_left = None if self._batches_left is None else self._batches_left - 1
        self._counts_before = counts
        self._failures.reset()
        return batch

    def _admit_more(self) -> None:
        """Admit groups up to the limit, start calls, and wake whoever waits for a batch if there is
        something to do."""
        while self._calls.is_open and not (self._prompts_ended or self._failures.is_over) and len(self.ledger) < self._capacity():
            try:
                position, prompt = self._prompts.take()
            except RequestsExhausted:
                self._prompts_ended = True
                break
            except Exception as error:
                self._fail(error)
                break
            group = self.ledger.admit(position, prompt, self.num_batches if self._is_waiting else max(0, self.num_batches - 1))
            self._selection.admit(group)
            self._calls.add(group)
        self._calls.start()
        if self._failure is not None or self._failures.is_over or not len(self.ledger) or self._is_complete():
            self._wake()

    def _capacity(self) -> int:
        """How many groups may be kept. Between two batches groups are admitted with the weights of
        the batch before, so that all kept ones must leave within the next K batches, not K + 1."""
        size, waiting = self._groups_per_batch, int(self._is_waiting)
        left = self._max_kept if self._batches_left is None else size * max(waiting, self._batches_left)
        return min(self._max_kept, left, size * (self._lag + waiting))

    def _make_selection(self) -> ArrivalOrder | SubmissionOrder:
        """The rule by which groups leave."""
        return ArrivalOrder(self._groups_per_batch, self._lag) if self._order == "arrival" else SubmissionOrder()

    def _count_retry(self) -> None:
        self.ledger.retried += 1

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._wake()

    def _fill(self, group: Group, member: int, value: Any) -> None:
        if self.ledger.fill(group, member, value):
            self._judge(group)

    def _judge(self, group: Group) -> None:
        """Let the filter judge a whole group. If it raises, the group is judged again when the next
        batch is requested."""
        try:
            is_accepted = self._accept(group)
            reason = "" if is_accepted or self._explain is None else self._explain(group)
        except Exception as error:
            self._fail(error)
            return
        self._failures.losses = 0  # those before this group were not in a row with later ones
        if is_accepted:
            self.ledger.arrive(group)
            self._selection.arrive(group)
        else:
            self._failures.reasons[reason] += 1
            self.ledger.remove(group, GroupState.REJECTED)
            self._selection.drop(group)
        self._admit_more()

    def _lose(self, group: Group, member: int, error: Exception) -> None:
        self.ledger.remove(group, GroupState.LOST)
        self._selection.drop(group)
        self._calls.drop(group)
        trace = error if self._failures.lose(error) else None
        message = "group %d is lost: member %d failed again and again, the last time with %s"
        logger.error(message, group.ordinal, member, describe_error(error), exc_info=trace)
        self._admit_more()


SHOWN_REASONS = 5
"""How many reasons of rejections an error shows."""


class FailureCounter:
    """Counts rejected groups by reason, and groups that were lost one after another."""

    def __init__(self, *, max_rejections: int, max_losses: int) -> None:
        self._max_rejections, self._max_losses = max_rejections, max_losses
        self.reasons: Counter[str] = Counter()
        """Reason of the filter -> groups that it has refused for this batch."""
        self.losses = 0
        """Groups lost since the last whole one."""
        self._last_error: Exception | None = None

    @property
    def is_out_of_patience(self) -> bool:
        """Whether more groups were rejected than a batch may cost."""
        return self.reasons.total() > self._max_rejections

    @property
    def is_losing(self) -> bool:
        """Whether the number of groups lost in a row says that something is broken."""
        return self.losses >= self._max_losses

    @property
    def is_over(self) -> bool:
        """Whether no more groups should be admitted for now."""
        return self.is_losing or self.is_out_of_patience

    def lose(self, error: Exception) -> bool:
        """A group is lost. Returns whether it is the first one in a row."""
        self.losses += 1
        self._last_error = error
        return self.losses == 1

    def reset(self) -> None:
        """Begin anew, with the next batch or after an error."""
        self.reasons.clear()
        self.losses, self._last_error = 0, None

    def make_error(self) -> RolloutError:
        """The error of too many losses or rejections, with their causes."""
        if self.is_losing:
            error = RolloutError(
                f"{self.losses} groups were lost one after another, the last one to "
                f"{describe_error(self._last_error)}; mend the cause, then ask for the batch again"
            )
            error.__cause__ = self._last_error
            return error
        number = self.reasons.total()
        shown = [f"{times} x {reason}" for reason, times in self.reasons.most_common(SHOWN_REASONS) if reason]
        more = len(self.reasons) - len(shown) if shown else 0
        listed = f" ({'; '.join(shown)}{f'; and {more} other reasons' if more else ''})" if shown else ""
        return RolloutError(
            f"the filter rejected {number} groups for one batch, more than patience * groups_per_batch ({self._max_rejections}){listed}; "
            "relax the filter, use prompts of other difficulty, raise patience, or set on_exhausted='short' for smaller batches"
        )
