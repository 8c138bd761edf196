"""Laws of the pool of groups, on a virtual clock."""

import asyncio
import contextlib
import json
import re
import threading
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings, strategies as st
from jumping_loop import play_jumping
from pool_playing import CountedPrompts, Fate, PlayedPool, play_killed

from ludic.errors import ConfigError, DataError, RequestsExhausted, RolloutAborted, RolloutError
from ludic.training.rollouts.group_ledger import MemberCodec
from ludic.training.rollouts.group_pool import GroupPool, MemberInterrupted


@st.composite
def pools(draw, max_lag=3):
    """Settings of a pool."""
    lag = draw(st.integers(0, max_lag))
    return {
        "groups_per_batch": draw(st.integers(1, 4)),
        "members_per_group": draw(st.integers(1, 3)),
        "over_sampling_factor": draw(st.floats(1, 1 + lag)),
        "max_lag": lag,
        "order": draw(st.sampled_from(["arrival", "submission"])),
        "max_concurrency": draw(st.none() | st.integers(1, 6)),
        "max_retries": draw(st.integers(1, 2)),
        "outage_patience_s": draw(st.sampled_from([0.0, 15.0])),
        "seed": draw(st.integers(0, 2**31 - 1)),
        "patience": 10_000,
    }


def fates():
    """What happens to the calls and groups of a pool."""
    shares = {name: st.floats(0, 0.4) for name in ("rejected", "failing", "doomed")}
    return st.builds(Fate, seed=st.integers(0, 2**20), **shares)


async def play_batches(played, number, *, train_s=0.0):
    batches = []
    async with played.pool:
        for _ in range(number):
            batch = await played.pool.next_batch()
            played.check_batch(batch)
            batches.append(batch)
            await asyncio.sleep(train_s)
    return batches


def trained(batches):
    return [[(group.ordinal, group.members) for group in batch] for batch in batches]


@given(pools(), fates(), st.floats(0, 5))
def test_batches_are_full_and_no_group_is_given_late_or_twice(pool, fate, train_s):
    played = PlayedPool(fate, pool)
    batches = play_jumping(play_batches(played, 6, train_s=train_s))
    assert [len(batch) for batch in batches] == [pool["groups_per_batch"]] * 6
    ordinals = [group.ordinal for batch in batches for group in batch]
    assert len(ordinals) == len(set(ordinals))
    assert played.most_running <= (pool["max_concurrency"] or 10**9)
    most = -(-pool["groups_per_batch"] * pool["over_sampling_factor"] // 1)
    assert played.pool.counts.kept <= most
    assert played.running == 0  # leaving the pool has ended all calls


@given(pools(), fates(), st.integers(0, 15))
def test_prompts_that_end_give_every_group_and_then_an_end(pool, fate, total):
    played = PlayedPool(fate, pool, total)

    async def play_all():
        batches = []
        async with played.pool:
            with contextlib.suppress(RequestsExhausted):
                while True:
                    batches.append(await played.pool.next_batch())
                    played.check_batch(batches[-1])
            with pytest.raises(RequestsExhausted):
                await played.pool.next_batch()
        return batches

    batches = play_jumping(play_all())
    assert all(len(batch) == pool["groups_per_batch"] for batch in batches[:-1])
    counts = played.pool.counts
    assert counts.admitted == total
    assert counts.kept == 0
    assert sum(len(batch) for batch in batches) == counts.given


@settings(max_examples=settings.default.max_examples // 2)
@given(pools(), fates())
def test_in_order_of_submission_timing_does_not_change_what_is_trained(pool, fate):
    """Whether a server is away is a matter of timing, so that nothing is waited out here."""
    pool["outage_patience_s"] = 0.0
    other = replace(fate, slow=0.0)
    runs = [
        PlayedPool(one, {**pool, "order": "submission", "max_concurrency": limit}) for one, limit in ((fate, None), (other, 2))
    ]
    first, second = (trained(play_jumping(play_batches(played, 5))) for played in runs)
    assert first == second


@settings(max_examples=settings.default.max_examples // 2)
@given(pools(max_lag=0), fates())
def test_without_lag_both_orders_are_the_same(pool, fate):
    runs = [PlayedPool(fate, {**pool, "order": order}) for order in ("arrival", "submission")]
    first, second = (trained(play_jumping(play_batches(played, 5))) for played in runs)
    assert first == second


@given(pools(), fates(), st.integers(1, 6))
def test_a_limited_run_throws_nothing_away(pool, fate, number):
    played = PlayedPool(fate, pool)
    played.pool.limit(number)
    play_jumping(play_batches(played, number))
    assert played.pool.counts.kept == 0


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(0, 2**31), st.integers(0, 3), st.sampled_from(["arrival", "submission"]))
def test_a_run_killed_at_any_moment_loses_doubles_and_splits_nothing(seed, max_lag, order):
    rng = Random(seed)
    factor = 1 + max_lag * rng.random()
    pool = {"groups_per_batch": 3, "members_per_group": 2, "over_sampling_factor": factor, "max_lag": max_lag, "patience": 10_000}
    fate = Fate(seed, rejected=0.3, failing=0.05, doomed=0.02)
    run = play_killed(fate, {**pool, "order": order, "max_retries": 2}, total=30, kills=rng.randint(1, 3), draw=rng.random)
    run.check(fate)


@settings(max_examples=settings.default.max_examples // 2)
@given(fates(), st.integers(0, 2**31))
def test_a_killed_run_in_order_of_submission_trains_what_one_without_kills_does(fate, seed):
    rng = Random(seed)
    pool = {"groups_per_batch": 3, "members_per_group": 2, "over_sampling_factor": 2.0, "order": "submission", "patience": 10_000}
    pool["outage_patience_s"] = 0.0
    without = play_killed(fate, pool, total=20, kills=0, draw=rng.random)
    killed = play_killed(fate, pool, total=20, kills=2, draw=rng.random)
    assert (killed.trained, killed.members) == (without.trained, without.members)


def test_a_failed_member_is_played_again_alone_with_its_seed():
    seeds = []

    async def play(ticket):
        seeds.append((ticket.member, ticket.attempt, ticket.seed))
        if ticket.member == 1 and ticket.attempt < 2:
            raise ConnectionError("refused")
        return ticket.member

    async def scenario():
        pool = make_pool(play=play, members_per_group=3, max_retries=2)
        return pool, await pool.next_batch()

    pool, [group] = play_jumping(scenario())
    assert group.members == [0, 1, 2]
    assert [member for member, _, _ in seeds] == [0, 1, 1, 2, 1]  # at once, then after a second
    assert len({seed for member, _, seed in seeds if member == 1}) == 1
    assert len({seed for _, _, seed in seeds}) == 3
    assert pool.counts.retried == 2


def make_pool(**changes):
    async def play(ticket):
        return ticket.ordinal

    defaults = {"play": play, "accept": lambda group: True, "prompts": CountedPrompts()}
    return GroupPool(**{**defaults, "groups_per_batch": 1, "members_per_group": 1, **changes})


def test_losses_in_a_row_are_an_error_with_their_cause_and_the_pool_goes_on_after_it():
    is_down = True

    async def play(ticket):
        if is_down:
            raise ConnectionError("refused")
        return 1

    async def scenario():
        nonlocal is_down
        pool = make_pool(play=play, groups_per_batch=3)
        async with pool:
            with pytest.raises(RolloutError, match=r"groups were lost .*ConnectionError: refused") as raised:
                await pool.next_batch()
            assert isinstance(raised.value.__cause__, ConnectionError)
            lost = pool.counts.lost
            assert lost >= 6
            assert str(raised.value).startswith(f"{lost} groups were lost")
            is_down = False
            assert [group.ordinal for group in await pool.next_batch()] == [lost, lost + 1, lost + 2]

    play_jumping(scenario())


def test_too_many_rejections_are_an_error_with_their_reasons():
    pool = make_pool(
        groups_per_batch=2, patience=3, accept=lambda group: False, explain=lambda group: f"rewards {group.ordinal % 2}"
    )
    with pytest.raises(RolloutError, match=r"groups_per_batch \(6\) \(4 x rewards 0; 4 x rewards 1\)") as raised:
        play_jumping(pool.next_batch())
    assert str(raised.value).startswith(f"the filter rejected {pool.counts.rejected} groups")


def test_a_short_batch_if_patience_ends_and_that_is_allowed():
    pool = make_pool(groups_per_batch=4, patience=2, on_exhausted="short", accept=lambda group: group.ordinal in (1, 5))
    batch = play_jumping(pool.next_batch())
    assert [group.ordinal for group in batch] == [1, 5]
    assert batch.rejected >= 9


def test_a_filter_that_raises_loses_no_group():
    calls = 0

    def accept(group):
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError("in the filter")
        return True

    async def scenario():
        async with make_pool(accept=accept) as pool:
            with pytest.raises(ZeroDivisionError):
                await pool.next_batch()
            json.dumps(pool.state_dict())
            return [group.ordinal for group in await pool.next_batch()]

    assert play_jumping(scenario()) == [0]


def test_an_abort_keeps_whole_members_and_a_resumed_pool_plays_only_the_others():
    played = []

    async def play(ticket):
        await asyncio.sleep(1.0 if ticket.member else 100.0)
        played.append(ticket.member)
        return ticket.member

    async def scenario():
        pool = make_pool(play=play, members_per_group=4)
        loop = asyncio.get_running_loop()
        async with pool:
            loop.call_later(5.0, pool.request_abort)
            with pytest.raises(RolloutAborted):
                await pool.next_batch()
            assert loop.time() == 5.0
            assert len(asyncio.all_tasks()) == 1
            with pytest.raises(RolloutAborted):
                await pool.next_batch()
            pool.resume()
            [group] = await pool.next_batch()
            return group.members

    assert play_jumping(scenario()) == [0, 1, 2, 3]
    assert played == [1, 2, 3, 0]


def test_an_abort_from_another_thread_ends_a_thousand_calls():
    async def play(ticket):
        await asyncio.Event().wait()

    async def scenario():
        pool = make_pool(play=play, members_per_group=1000)
        async with pool:
            waiting = asyncio.create_task(pool.next_batch())
            while len(asyncio.all_tasks()) < 1002:
                await asyncio.sleep(0)
            thread = threading.Thread(target=pool.request_abort)
            thread.start()
            thread.join()
            with pytest.raises(RolloutAborted):
                await waiting
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_an_interrupted_member_goes_on_from_what_it_had():
    async def play(ticket):
        tokens = list(ticket.partial or [])
        try:
            while len(tokens) < 5:
                await asyncio.sleep(1.0)
                tokens.append(len(tokens))
        except asyncio.CancelledError:
            raise MemberInterrupted(tokens, has_grown=True) from None
        return tokens

    async def scenario():
        pool, loop = make_pool(play=play), asyncio.get_running_loop()
        loop.call_later(2.5, pool.request_abort)
        with pytest.raises(RolloutAborted):
            await pool.next_batch()
        resumed = make_pool(play=play)
        resumed.load_state_dict(json.loads(json.dumps(pool.state_dict())))
        [group] = await resumed.next_batch()
        return group.members, loop.time()

    assert play_jumping(scenario()) == ([[0, 1, 2, 3, 4]], 5.5)


def test_a_call_that_ignores_its_cancellation_is_given_up_and_not_used(caplog):
    release = None

    async def play(ticket):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)
        await asyncio.shield(release)
        return "late"

    async def scenario():
        nonlocal release
        release = asyncio.get_running_loop().create_future()
        pool = make_pool(play=play, close_timeout_s=7.0)
        async with pool:
            asyncio.get_running_loop().call_later(1.0, pool.request_abort)
            with pytest.raises(RolloutAborted):
                await pool.next_batch()
            assert asyncio.get_running_loop().time() == 8.0
        release.set_result(None)
        await asyncio.sleep(1.0)
        return pool.counts

    assert play_jumping(scenario()).owed == 1
    assert re.search("1 calls .*cancellation for 7 s", caplog.text)


def test_calls_cancelled_by_somebody_else_are_an_error_and_played_again():
    async def play(ticket):
        await asyncio.sleep(10.0)
        return ticket.member

    async def scenario():
        async with make_pool(play=play, members_per_group=3) as pool:
            waiting = asyncio.create_task(pool.next_batch())
            await asyncio.sleep(1.0)
            for task in asyncio.all_tasks() - {waiting, asyncio.current_task()}:
                task.cancel()
            with pytest.raises(RolloutError, match="cancelled from outside"):
                await waiting
            [group] = await pool.next_batch()
            return group.members

    assert play_jumping(scenario()) == [0, 1, 2]


def test_calls_outside_async_with_end_with_the_batch():
    async def play(ticket):
        await asyncio.sleep(1.0 + 50 * ticket.ordinal)
        return ticket.ordinal

    async def scenario():
        pool = make_pool(play=play, over_sampling_factor=3.0)
        assert [group.ordinal for group in await pool.next_batch()] == [0]
        assert len(asyncio.all_tasks()) == 1
        assert pool.counts.owed == 2

    play_jumping(scenario())


def test_a_cancellation_while_calls_are_slow_to_end_loses_no_batch():
    """The second group takes a second to end after the first, which is the batch, is whole."""

    async def play(ticket):
        try:
            await asyncio.sleep(1.0 + 50 * ticket.ordinal)
        finally:
            await asyncio.sleep(float(ticket.ordinal))
        return ticket.ordinal

    async def scenario():
        pool = make_pool(play=play, over_sampling_factor=2.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.next_batch(), 1.5)
        assert (pool.counts.given, pool.counts.arrived, pool.num_batches) == (0, 1, 0)
        return [group.ordinal for group in await pool.next_batch()]

    assert play_jumping(scenario()) == [0]


@pytest.mark.parametrize("is_entered", [True, False])
def test_leaving_a_pool_ends_the_batch_that_a_task_awaits(is_entered):
    async def scenario():
        pool = make_pool(play=lambda ticket: asyncio.sleep(10.0, ticket.ordinal))
        if is_entered:
            await pool.__aenter__()
        waiting = asyncio.create_task(pool.next_batch())
        await asyncio.sleep(1.0)
        await pool.__aexit__(None, None, None)
        with pytest.raises(RolloutAborted, match="left while a batch was awaited"):
            await waiting
        assert len(asyncio.all_tasks()) == 1
        return [group.ordinal for group in await pool.next_batch()]

    assert play_jumping(scenario()) == [0]


def test_an_abort_that_is_resumed_at_once_ends_the_batch_that_was_awaited():
    async def scenario():
        pool = make_pool(play=lambda ticket: asyncio.sleep(10.0, ticket.ordinal))
        waiting = asyncio.create_task(pool.next_batch())
        await asyncio.sleep(1.0)
        pool.request_abort()
        asyncio.get_running_loop().call_soon(pool.resume)
        with pytest.raises(RolloutAborted):
            await waiting
        return [group.ordinal for group in await pool.next_batch()]

    assert play_jumping(scenario()) == [0]


def test_a_group_admitted_between_batches_has_the_weights_of_the_batch_before():
    """K = 1 and N = 2: after batch 0 two of four groups are kept, which is all that batch 1 can
    take, so that none is admitted before it is asked for. With K = 2 two are, and count as of
    batch 0."""

    async def scenario(max_lag):
        async def play(ticket):
            await asyncio.sleep(1.0)

        pool = make_pool(play=play, groups_per_batch=2, over_sampling_factor=2.0, max_lag=max_lag)
        async with pool:
            await pool.next_batch()
            await asyncio.sleep(0.5)
            admitted = pool.counts.admitted
            batches = [await pool.next_batch() for _ in range(2)]
            return admitted, [batch.lags for batch in batches]

    assert play_jumping(scenario(1)) == (4, [[1, 1], [1, 1]])
    assert play_jumping(scenario(2)) == (6, [[1, 1], [2, 2]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups_per_batch": 0}, r"groups_per_batch \(0\) must be at least 1"),
        ({"max_concurrency": 0}, r"max_concurrency \(0\) must be at least 1"),
        ({"max_retries": -1}, r"max_retries \(-1\) must be at least 0"),
        ({"over_sampling_factor": 0.5}, r"over_sampling_factor \(0.5\) must be at least 1"),
        ({"over_sampling_factor": float("nan")}, r"over_sampling_factor \(nan\) must be at least 1"),
        ({"over_sampling_factor": 2.5, "max_lag": 1}, "set max_lag=2"),
        ({"max_lag": -1}, "max_lag"),
        ({"order": "random"}, r"order \(.random.\) must be one of arrival, submission"),
        ({"on_exhausted": "stop"}, r"on_exhausted \(.stop.\) must be one of error, short"),
        ({"close_timeout_s": 0}, r"close_timeout_s \(0\) must be above 0"),
        ({"outage_patience_s": -1}, r"outage_patience_s \(-1\) must be at least 0"),
        ({"outage_patience_s": float("inf")}, r"outage_patience_s \(inf\) must be .* finite"),
    ],
)
def test_wrong_settings_are_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_pool(**changes)


def test_the_least_lag_is_the_default():
    assert [make_pool(over_sampling_factor=factor).max_lag for factor in (1.0, 1.1, 1.5, 2.0, 2.1, 3.0)] == [0, 1, 1, 1, 2, 2]


def test_a_state_that_does_not_fit_is_an_error():
    state = make_pool().state_dict()
    with pytest.raises(ConfigError, match=r"have 1 members each, here .*2"):
        make_pool(members_per_group=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="format"):
        make_pool().load_state_dict({**state, "format": 9})
    with pytest.raises(ConfigError, match="damaged"):
        make_pool().load_state_dict({**state, "next_ordinal": 3})


def test_a_member_that_cannot_be_saved_is_played_again(caplog):
    class Codec(MemberCodec):
        def encode(self, member):
            if member == "no JSON":
                raise DataError("it has no form")
            return member

    def play_with(value):
        async def play(ticket):
            return value if ticket.member else ticket.ordinal

        return play

    async def scenario():
        settings = {"members_per_group": 2, "groups_per_batch": 2, "over_sampling_factor": 2.0, "codec": Codec()}
        async with make_pool(play=play_with("no JSON"), **settings) as pool:
            await pool.next_batch()
            await asyncio.sleep(1.0)
            assert pool.counts.arrived == 2
            state = json.loads(json.dumps(pool.state_dict()))
        resumed = make_pool(play=play_with("new"), **settings)
        resumed.load_state_dict(state)
        assert (resumed.counts.arrived, resumed.counts.owed) == (0, 2)
        return [group.members for group in await resumed.next_batch()]

    assert play_jumping(scenario()) == [[2, "new"], [3, "new"]]
    assert re.search(r"member 1 of group 2 .*\(it has no form\)", caplog.text)


def test_prompts_without_positions_are_in_the_state():
    async def scenario():
        pool = make_pool(play=lambda ticket: asyncio.sleep(10), prompts_in_state=True)
        asyncio.get_running_loop().call_later(1.0, pool.request_abort)
        with pytest.raises(RolloutAborted):
            await pool.next_batch()
        return pool.state_dict()

    assert play_jumping(scenario())["groups"][0]["prompt"] == "prompt 0"


def test_calls_that_fail_cost_no_more_than_their_repetition():
    """p = 0.3 of calls fail: 1 / (1 - p) calls a member, and little more for groups that are
    lost."""
    fate = Fate(1, failing=0.3, spares=False)
    played = PlayedPool(fate, {"groups_per_batch": 40, "members_per_group": 8, "max_retries": 5})
    play_jumping(play_batches(played, 4))
    assert played.calls / (4 * 40 * 8) <= 1.05 / 0.7


def test_groups_are_lost_as_often_as_chance_says():
    """A member fails twice with p^2 = 0.09, a group of 8 is lost with q = 1 - 0.91^8 = 0.530."""
    pool = {"groups_per_batch": 60, "members_per_group": 8, "max_retries": 1, "outage_patience_s": 0}
    played = PlayedPool(Fate(2, failing=0.3, spares=False), pool)
    play_jumping(play_batches(played, 3))
    counts, q = played.pool.counts, 1 - (1 - 0.3**2) ** 8
    settled = counts.lost + counts.given
    assert abs(counts.lost - q * settled) <= 3 * (settled * q * (1 - q)) ** 0.5
