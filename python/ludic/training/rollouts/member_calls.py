"""The calls that play the members of groups: started in order, a limited number at the same time,
repeated where they fail, and stopped together.

When a call that failed is repeated, and when its member is given up.

A member is given up after `max_retries` + 1 failures in a row, except in an outage, which is when
no call of any member succeeds: then a server is away, and losing groups would not help.

    max_retries = 1, seconds since the first failure of a member
    0  fails, repeated now         0  fails again: are there successes of other calls since then,
                                      or since this call began?
       yes  it is given up         no  it is repeated after 1, 2, 4, 8, 8 ... s, until the outage
                                       is over or has lasted `patience_s`

After an outage that it has lived through, a member has `max_retries` + 1 failures again, and may
live through the next one: `max_retries` + 1 in a row, since a member that alone fails immediately
may see what looks like an outage between two slow successes of others.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from ludic.errors import RolloutError
from ludic.event_loop import describe_error, is_being_cancelled
from ludic.inference.request import derive_seed
from ludic.training.reward_functions import RewardsBroken
from ludic.training.rollouts.group_ledger import Group, GroupState

logger = logging.getLogger(__name__)

MemberKey = tuple[int, int]
"""(ordinal of the group, member)"""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One call that plays one member."""

    ordinal: int
    """The group."""
    member: int
    """From 0 to members_per_group - 1."""
    attempt: int
    """How many calls for this member have failed in a row before, since calls were last allowed."""
    prompt: Any
    seed: int
    """31 bits that follow from the pool's seed, the ordinal and the member; the same in every
    attempt."""
    partial: Any = None
    """What `MemberInterrupted` had of this member, or None."""


class MemberInterrupted(Exception):
    """Raised by `play` with what it has sampled of a member so far. The next call for the member
    gets it as `Ticket.partial`.

    `has_grown`: whether that is more than the ticket had. Such a call has not failed, however often
    the member is interrupted. One without progress has, and what the ticket had is kept.
    """

    def __init__(self, partial: Any, *, has_grown: bool) -> None:
        super().__init__("the call was interrupted before it had sampled anything more")
        self.partial, self.has_grown = partial, has_grown


class MemberCalls:
    """Plays the missing members of groups, the lowest ordinals first, at most `max_concurrency` at
    the same time (None means all).

    `fill(group, member, value)` is called with what `play` returned, `lose(group, member, error)`
    when a member is given up, by the rule above; neither for a group that is not owed
    any more. A member that waits for its next call takes no place of `max_concurrency`.
    `retry()` is called before a call is repeated, `fail(error)` if all calls have been cancelled
    because one of them was, by somebody else.
    """

    def __init__(
        self,
        play: Callable[[Ticket], Awaitable[Any]],
        *,
        fill: Callable[[Group, int, Any], None],
        lose: Callable[[Group, int, Exception], None],
        retry: Callable[[], None],
        fail: Callable[[Exception], None],
        max_retries: int,
        max_concurrency: int | None,
        seed: int,
        outage_patience_s: float = 0.0,
    ) -> None:
        self._play, self._fill, self._lose, self._retry, self._fail = play, fill, lose, retry, fail
        self._max_retries, self._max_concurrency, self._seed = max_retries, max_concurrency, seed
        self._waiting: list[tuple[int, int, Group]] = []
        """A heap; no two entries have the same ordinal and member, so that groups are not
        compared."""
        self._running: dict[MemberKey, asyncio.Task[None]] = {}
        self._resting: dict[MemberKey, asyncio.TimerHandle] = {}
        """Members whose last call failed, until their next one."""
        self._failed: dict[MemberKey, FailedCalls] = {}
        self._context = Context()
        self.outage = Outage(outage_patience_s)
        self.is_open = False
        """Whether waiting calls start."""

    def open(self) -> None:
        """Let calls start. Each runs in its own copy of the present context."""
        self._context, self.is_open = copy_context(), True

    def add(self, group: Group) -> None:
        """Let the missing members of the group wait for their turn."""
        for member in group.list_missing():
            heapq.heappush(self._waiting, (group.ordinal, member, group))

    def start(self) -> None:
        """Start waiting calls up to the limit."""
        while self.is_open and self._waiting and (self._max_concurrency is None or len(self._running) < self._max_concurrency):
            ordinal, member, group = heapq.heappop(self._waiting)
            if group.state is not GroupState.OWED:
                continue  # lost to another member
            task = asyncio.create_task(self._run(group, member), context=self._context.copy())
            self._running[ordinal, member] = task
            task.add_done_callback(partial(self._forget, group, member))

    def drop(self, group: Group) -> None:
        """Cancel the calls of a group that is not owed any more, except the current one."""
        for member in group.list_missing():
            self._stop_resting((group.ordinal, member))
            task = self._running.get((group.ordinal, member))
            if task is not None and task is not asyncio.current_task():
                _cancel_once(task)

    def cancel(self) -> None:
        """Cancel the calls that run, forget those that wait, and let none start."""
        self.is_open = False
        self._waiting.clear()
        for key in [*self._failed, *self._resting]:
            self._stop_resting(key)
        self.outage.forget()
        for task in self._running.values():
            _cancel_once(task)

    async def stop(self, timeout_s: float) -> None:
        """`cancel`, and wait until the calls have ended. Those that have not after `timeout_s` are
        given up: a warning says so, and what they return is not used."""
        self.cancel()
        stopped = dict(self._running)
        if not stopped:
            return
        try:
            _, left = await asyncio.wait(stopped.values(), timeout=timeout_s)
        finally:
            for key, task in stopped.items():
                if self._running.get(key) is task:
                    del self._running[key]
        if left:
            logger.warning("%d calls ignored their cancellation for %g s and are given up", len(left), timeout_s)

    async def _run(self, group: Group, member: int) -> None:
        """Play the member until a call succeeds, must wait, or is the last one."""
        key = (group.ordinal, member)
        seed = seed_of_member(self._seed, group.ordinal, member)
        while True:
            attempt = self._failed[key].number if key in self._failed else 0
            ticket = Ticket(group.ordinal, member, attempt, group.prompt, seed, group.partials.get(member))
            successes_before = self.outage.successes
            value, error = await self._call(ticket)
            if group.state is not GroupState.OWED or self._running.get(key) is not asyncio.current_task():
                return  # the group is lost, or this call was given up
            if isinstance(error, RewardsBroken):
                self.cancel()
                self._fail(error)
                return
            has_grown = isinstance(error, MemberInterrupted) and error.has_grown
            if isinstance(error, MemberInterrupted) and has_grown:
                group.partials[member] = error.partial
            if error is None or has_grown:
                self.outage.succeed()
                self._failed.pop(key, None)
            if error is None:
                self._fill(group, member, value)
                return
            if is_being_cancelled() or not (has_grown or self._may_repeat(group, member, error, successes_before)):
                return

    def _may_repeat(self, group: Group, member: int, error: Exception, successes_before: int) -> bool:
        """Whether to repeat a failed call immediately. Otherwise it is repeated later, or the
        member is given up."""
        key, loop = (group.ordinal, member), asyncio.get_running_loop()
        failed = self._failed.setdefault(key, FailedCalls(self.outage, self._max_retries))
        has_waited, wait_s = failed.is_waiting_out, failed.fail(loop.time(), successes_before)
        if wait_s is None:
            self._lose(group, member, error)
            return False
        if has_waited and failed.is_waiting_out and not self.outage.is_reported:
            self.outage.is_reported = True
            message = "calls fail, this one with %s, and none succeeds; they are repeated for up to %g s before groups are lost"
            logger.warning(message, describe_error(error), self.outage.patience_s)
        logger.info("member %d of group %d failed with %s; it is played again", member, group.ordinal, describe_error(error))
        if wait_s:
            self._resting[key] = loop.call_later(wait_s, self._end_rest, group, member)
            return False
        self._retry()
        return True

    def _end_rest(self, group: Group, member: int) -> None:
        """The next call of a member may start."""
        del self._resting[group.ordinal, member]
        self._retry()
        heapq.heappush(self._waiting, (group.ordinal, member, group))
        self.start()

    def _stop_resting(self, key: MemberKey) -> None:
        """Forget the failures of a member, and its next call."""
        self._failed.pop(key, None)
        if key in self._resting:
            self._resting.pop(key).cancel()

    async def _call(self, ticket: Ticket) -> tuple[Any, Exception | None]:
        """(what `play` returns, None), or (None, its error)."""
        try:
            return await self._play(ticket), None
        except asyncio.CancelledError as cancelled:
            if is_being_cancelled():
                raise
            error = RolloutError("something that the call waited for was cancelled")
            error.__cause__ = cancelled
            return None, error
        except Exception as error:
            return None, error

    def _forget(self, group: Group, member: int, task: asyncio.Task[None]) -> None:
        """The call has ended: the next one may start."""
        if self._running.get((group.ordinal, member)) is task:
            del self._running[group.ordinal, member]
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": "a call of a pool of groups failed", "exception": error, "task": task}
            )
        if (
            task.cancelled() and self.is_open and group.state is GroupState.OWED
        ):  # the loop ends, or users' code cancels all tasks
            self.cancel()
            self._fail(RolloutError("the calls of the pool were cancelled from outside; ask for the batch again"))
        self.start()


def seed_of_member(seed: int, ordinal: int, member: int) -> int:
    """The seed of a member of group `ordinal`, 31 bits, from the seed of the run."""
    derived = derive_seed(derive_seed(seed, ordinal + 1), member + 1)
    assert derived is not None
    return derived


def _cancel_once(task: asyncio.Task[None]) -> None:
    """Cancel the task unless it is being cancelled: a second cancellation would interrupt what
    users' code does to end well, such as closing an environment."""
    if not task.cancelling():
        task.cancel()


FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 8.0


class Outage:
    """Whether calls succeed."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.successes = 0
        """Calls that have succeeded so far."""
        self.is_reported = False
        """Whether the log has a line of the present outage."""
        self._since_s: float | None = None
        """When the first call failed after the last success, on the loop's clock."""

    def succeed(self) -> None:
        """A call has returned something."""
        self.successes += 1
        self.forget()

    def fail(self, now_s: float) -> None:
        """A call has failed."""
        if self._since_s is None:
            self._since_s = now_s

    def left_s(self, now_s: float) -> float:
        """How many seconds of patience are left."""
        return self.patience_s if self._since_s is None else max(0.0, self._since_s + self.patience_s - now_s)

    def forget(self) -> None:
        """Begin anew with all patience."""
        self._since_s, self.is_reported = None, False


class FailedCalls:
    """The failures in a row of one member."""

    def __init__(self, outage: Outage, max_retries: int) -> None:
        self._outage, self._max_retries = outage, max_retries
        self.number = 0
        self._counted = 0
        """Failures since the first one, or since an outage."""
        self._successes = 0
        """Successes of all members before the first of the counted failures."""
        self._outages = 0
        """Outages that the member has lived through since its last success."""
        self.is_waiting_out = False
        """Whether the member would be given up, were it not for an outage."""

    def fail(self, now_s: float, successes_before: int) -> float | None:
        """The member's call has failed, which began after this number of successes of all members.
        Returns how many seconds to wait before the next one, or None to give the member up."""
        self._outage.fail(now_s)
        successes = self._outage.successes
        if not self.number:
            self._successes = successes
        self.number, self._counted = self.number + 1, self._counted + 1
        if successes != self._successes and self.is_waiting_out:
            self.is_waiting_out, self._counted, self._successes = False, 1, successes
            self._outages += 1
        if self._counted <= self._max_retries:
            return _wait_s(self._counted)
        left_s = self._outage.left_s(now_s)
        if successes > min(self._successes, successes_before) or not left_s or self._outages > self._max_retries + 1:
            return None
        self.is_waiting_out = True
        return min(max(FIRST_WAIT_S, _wait_s(self._counted)), left_s)


def _wait_s(failures: int) -> float:
    """Seconds before the call after this number of failures: 0, 1, 2, 4, 8, 8 ..."""
    return 0.0 if failures <= 1 else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures - 2, 30))
