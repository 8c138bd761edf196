"""When failed calls are repeated: a server that is away loses no group, a member that alone fails
is given up at once, and one that grows between interruptions has not failed."""

import asyncio
import itertools

import pytest
from hypothesis import given, strategies as st
from jumping_loop import play_jumping
from pool_playing import CountedPrompts

from ludic.errors import RolloutAborted, RolloutError
from ludic.training.rollouts.group_pool import GroupPool, MemberInterrupted
from ludic.training.rollouts.member_calls import FailedCalls, Outage


def make_pool(play, **changes):
    defaults = {"accept": lambda group: True, "prompts": CountedPrompts(), "groups_per_batch": 4, "members_per_group": 2}
    return GroupPool(play=play, **{**defaults, **changes})


def away_until(seconds, begun):
    """Calls that fail at once until then, and take a second afterwards."""

    async def play(ticket):
        loop = asyncio.get_running_loop()
        begun.append(loop.time())
        if loop.time() < seconds:
            raise ConnectionError("refused")
        await asyncio.sleep(1.0)
        return ticket.member

    return play


@pytest.mark.parametrize("max_retries", [0, 1, 3])
@pytest.mark.parametrize("max_concurrency", [None, 3])
@pytest.mark.parametrize("away_s", [0.5, 6.0, 14.0])
def test_a_server_that_is_away_for_seconds_loses_no_group(max_retries, max_concurrency, away_s):
    begun = []

    async def scenario():
        settings = {"max_retries": max_retries, "max_concurrency": max_concurrency, "over_sampling_factor": 1.5}
        async with make_pool(away_until(away_s, begun), order="submission", **settings) as pool:
            batch = await pool.next_batch()
            return [group.ordinal for group in batch], pool.counts, asyncio.get_running_loop().time()

    ordinals, counts, seconds = play_jumping(scenario())
    assert (ordinals, counts.lost) == ([0, 1, 2, 3], 0)
    assert seconds <= away_s + 8 + 4  # the longest wait, then 8 members of a second, at least 3 at once
    assert sum(time < away_s for time in begun) <= 12 * 6  # 12 members, each at 0, 0, 1, 3, 7 ... s


def test_the_waits_grow_from_a_second_to_eight():
    begun = []

    async def scenario():
        pool = make_pool(away_until(40.0, begun), groups_per_batch=1, members_per_group=1, max_retries=1, outage_patience_s=60.0)
        await pool.next_batch()

    play_jumping(scenario())
    assert begun == [0, 0, 1, 3, 7, 15, 23, 31, 39, 47]


def test_after_its_patience_the_pool_says_what_failed_and_the_next_batch_has_all_patience_again():
    begun = []

    async def scenario():
        loop = asyncio.get_running_loop()
        pool = make_pool(away_until(20.0, begun))
        with pytest.raises(RolloutError, match=r"\d+ groups were lost .*ConnectionError: refused"):
            await pool.next_batch()
        assert loop.time() == 15.0
        lost = pool.counts.lost
        await pool.next_batch()
        return lost, pool.counts.lost

    lost, lost_at_the_end = play_jumping(scenario())
    assert lost_at_the_end == lost >= 8


def test_a_member_that_alone_fails_is_given_up_at_once():
    async def play(ticket):
        await asyncio.sleep(0.1 * ticket.member)
        if (ticket.ordinal, ticket.member) == (1, 7):
            raise OSError("a broken game")
        return ticket.member

    async def scenario():
        pool = make_pool(play, members_per_group=8, max_retries=1)
        await pool.next_batch()
        return pool.counts.lost, pool.counts.retried, asyncio.get_running_loop().time()

    lost, retried, seconds = play_jumping(scenario())
    assert (lost, retried) == (1, 1)
    assert seconds == pytest.approx(2 * 0.7 + 0.7)  # two calls of 0.7 s, and the group in its place


def test_a_member_has_all_its_calls_again_after_an_outage():
    """The server comes back at 5 s, and one member fails once more then."""
    calls = []

    async def play(ticket):
        now = asyncio.get_running_loop().time()
        calls.append((ticket.member, now))
        if now < 5 or (ticket.member == 1 and sum(member == 1 and time >= 5 for member, time in calls) == 1):
            raise ConnectionError("refused")
        return ticket.member

    async def scenario():
        pool = make_pool(play, groups_per_batch=1, max_retries=1)
        [group] = await pool.next_batch()
        return group.ordinal, pool.counts.lost

    assert play_jumping(scenario()) == (0, 0)


@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_a_second_outage_loses_no_group_either(max_retries):
    """The server is away until 2 s, answers one call, and is away again until 5 s."""
    answered = []

    async def play(ticket):
        now = asyncio.get_running_loop().time()
        if now < 2 or (now < 5 and answered):
            raise ConnectionError("refused")
        answered.append(now)
        return ticket.member

    async def scenario():
        pool = make_pool(play, groups_per_batch=1, members_per_group=3, max_retries=max_retries)
        [group] = await pool.next_batch()
        return group.ordinal, group.members, pool.counts.lost

    assert play_jumping(scenario()) == (0, [0, 1, 2], 0)
    assert answered[0] < 5 <= answered[1]


def test_without_retries_a_call_during_which_another_succeeded_is_not_repeated():
    failed = []

    async def play(ticket):
        await asyncio.sleep(1.0 + ticket.member)
        if (ticket.ordinal, ticket.member) == (0, 1):
            failed.append(ticket.attempt)
            raise OSError("a broken game")
        return ticket.member

    async def scenario():
        pool = make_pool(play, groups_per_batch=1, max_retries=0)
        [group] = await pool.next_batch()
        return group.ordinal, pool.counts.lost, pool.counts.retried

    assert play_jumping(scenario()) == (1, 1, 0)
    assert failed == [0]


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_a_member_that_fails_at_once_is_given_up_though_others_seldom_succeed(max_retries):
    """The calls of others take 20 s, so that each of their successes looks like the end of an
    outage; what is played never ends."""

    async def play(ticket):
        if ticket.ordinal == 0:
            raise OSError("a broken game")
        await asyncio.sleep(20.0)
        return ticket.member

    async def scenario():
        settings = {"groups_per_batch": 100, "max_concurrency": 2, "outage_patience_s": 60.0}
        pool = make_pool(play, members_per_group=1, max_retries=max_retries, **settings)
        batch = await pool.next_batch()
        return [group.ordinal for group in batch], pool.counts.lost, pool.counts.retried

    ordinals, lost, retried = play_jumping(scenario())
    assert (ordinals, lost) == (list(range(1, 101)), 1)
    assert retried <= (max_retries + 2) * (max_retries + 8)  # an outage of 20 s: waits of 1, 2, 4, 8, 8 s


def test_an_abort_does_not_wait_for_the_next_call():
    async def scenario():
        loop = asyncio.get_running_loop()
        async with make_pool(away_until(1e9, []), max_retries=100) as pool:
            loop.call_later(20.0, pool.request_abort)
            with pytest.raises(RolloutAborted):
                await pool.next_batch()
            assert len(asyncio.all_tasks()) == 1
            return loop.time(), pool.counts.owed, pool.counts.lost

    assert play_jumping(scenario()) == (20.0, 4, 0)


def test_a_member_that_grows_between_interruptions_is_never_lost_and_one_that_does_not_is():
    tickets = []

    async def play(ticket):
        tickets.append(ticket)
        tokens = list(ticket.partial or [])
        if ticket.ordinal == 0 and len(tokens) == 3:
            raise MemberInterrupted([], has_grown=False)
        tokens.append(ticket.attempt)
        if len(tokens) < 20:
            raise MemberInterrupted(tokens, has_grown=True)
        return tokens

    async def scenario():
        pool = make_pool(play, groups_per_batch=1, members_per_group=1, outage_patience_s=0)
        return [(group.ordinal, group.members) for group in await pool.next_batch()], pool.counts

    given_groups, counts = play_jumping(scenario())
    assert given_groups == [(1, [[0] * 20])]
    assert (counts.lost, counts.retried) == (1, 1)  # two calls without progress
    assert [len(ticket.partial) for ticket in tickets[3:5]] == [3, 3]  # what it had is kept


WAITS_AND_SUCCESSES = st.tuples(st.floats(0, 3), st.integers(0, 2), st.integers(0, 1))
"""Seconds until the next call; successes of others before it, and while it runs."""


@given(st.integers(0, 4), st.floats(0, 60), st.lists(WAITS_AND_SUCCESSES, max_size=60))
def test_waits_end_and_a_member_is_given_up_only_for_a_reason(max_retries, patience_s, events):
    """A random series of failures, with successes of other members in between, and then none."""
    outage, now_s = Outage(patience_s), 0.0
    failed, failures = FailedCalls(outage, max_retries), 0
    for later_s, successes, successes_during in events:
        for _ in range(successes):
            outage.succeed()
        before = outage.successes
        for _ in range(successes_during):
            outage.succeed()
        wait_s = failed.fail(now_s, before)
        failures += 1
        if wait_s is None:
            assert failures > max_retries
            return
        assert 0 <= wait_s <= 8
        now_s += wait_s + later_s
    for _ in itertools.count():  # no more successes
        wait_s = failed.fail(now_s, outage.successes)
        failures += 1
        if wait_s is None:
            break
        now_s += wait_s
    assert failures > max_retries
