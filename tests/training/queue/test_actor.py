"""The loop of an actor: its weights, its leases, and its failures."""

import asyncio
import itertools

import pytest
from memory_log import unreachable
from queue_runs import in_virtual_time, sample, virtual_patience

from ludic.errors import ConfigError, QueueError, RolloutError
from ludic.training.queue.actor import poll_after, run_actor
from ludic.training.queue.base import Work
from ludic.training.queue.entries import decode_group
from ludic.training.rollouts.episodes import EpisodeFailure, PlayedRollouts, RolloutCounts


async def no_weights(version):
    pass


async def play_at_once(work):
    return sample(work)


def start(log, **options):
    options = {"play": play_at_once, "weights": no_weights, "actor": "a", **options}
    return asyncio.create_task(run_actor(log, patience=virtual_patience(), **options))


def open_with(log, *numbers, version=0, announced=0):
    log.claim("t", run="r")
    log.announce("t", announced)
    log.offer("t", [Work(number, version) for number in numbers])


def groups_in(log):
    return [decode_group(entry.payload) for entry in log.read(None, limit=100)]


async def until(condition):
    """Wait, in virtual time, until `condition()`."""
    while not condition():
        await asyncio.sleep(0.01)


async def cancel(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@in_virtual_time
async def test_what_is_offered_is_played_and_delivered_until_the_log_is_closed(log):
    open_with(log, 0, 1, 2, version=4, announced=6)
    actor = start(log, actor="me")
    await until(lambda: len(groups_in(log)) == 3)
    first = groups_in(log)[0]
    assert (first.run, first.number, first.version, first.actor) == ("r", 0, 4, "me")
    assert list(first.played) == sample(Work(0, 4))
    log.close("t")
    assert await actor == 3


@in_virtual_time
async def test_weights_are_those_of_the_work_or_the_newest_by_arrival(log):
    open_with(log, 0, version=2, announced=5)
    for order, expected in [("exact", 2), ("arrival", 5)]:
        loaded = []

        async def weights(version, loaded=loaded):
            loaded.append(version)

        log.offer("t", [Work(0, 2)])
        actor = start(log, weights=weights, order=order)
        await until(lambda: groups_in(log))
        assert loaded == [expected]
        assert groups_in(log)[0].version == expected
        log.forget("t", log.read(None)[0].position)
        await cancel(actor)


@in_virtual_time
async def test_a_lease_whose_weights_do_not_exist_yet_is_given_back_after_a_second(log):
    """The trainer went back and needs group 0 before version 9 can exist: the only actor plays it,
    although it had taken group 5 before."""
    open_with(log, 5, version=9, announced=1)
    actor = start(log)
    await until(lambda: log.stats().leased)
    log.offer("t", [Work(0, 1)])
    since = log.clock()
    await until(lambda: groups_in(log))
    assert groups_in(log)[0].number == 0
    assert log.clock() - since < 2
    log.announce("t", 9)
    await until(lambda: len(groups_in(log)) == 2)
    assert groups_in(log)[1].attempt == 0  # giving it back was no failure
    await cancel(actor)


@in_virtual_time
async def test_a_lease_is_renewed_while_a_long_group_is_played(log):
    async def play_long(work):
        await asyncio.sleep(500)
        return sample(work)

    open_with(log, 0)
    actor = start(log, play=play_long, lease_s=6)
    for _ in range(60):
        await asyncio.sleep(8)
        assert log.lease("thief") is None
    await until(lambda: groups_in(log))
    assert groups_in(log)[0].attempt == 0
    await cancel(actor)


@in_virtual_time
async def test_a_group_that_somebody_else_delivered_is_not_played_on(log):
    played = []

    async def play(work):
        played.append(work.number)
        try:
            await asyncio.sleep(1000 if work.number == 0 else 0)
        except asyncio.CancelledError:
            played.append("cancelled")
            raise
        return sample(work)

    open_with(log, 0, 1)
    actor = start(log, play=play, lease_s=6)
    await until(lambda: played)
    log.withdraw("t", [0])
    await until(lambda: len(played) == 3)
    assert played == [0, "cancelled", 1]
    await cancel(actor)


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_group_is_given_back_at_once_when_the_actor_ends(how):
    @in_virtual_time
    async def run(log):
        open_with(log, 0)
        stop, waits = asyncio.Event(), asyncio.Event()
        actor = start(log, play=lambda work: waits.wait(), stop=stop)
        await until(lambda: log.stats().leased)
        if how == "cancel":
            await cancel(actor)
        else:
            stop.set()
            assert await actor == 0
        lease = log.lease("next")
        assert lease is not None
        assert lease.work.attempt == 0

    run()


@in_virtual_time
async def test_a_group_that_fails_for_good_is_delivered_as_failed_with_its_counts(log):
    counts = RolloutCounts(num_episodes=4, num_failed_episodes=2, num_cancelled_episodes=2, num_dropped_groups=1)
    failures = [EpisodeFailure(3, "env", 5, "ValueError: broke", 2, {})]

    async def play(work):
        raise RolloutError("4 of 4 episodes failed", played=PlayedRollouts([], counts, failures, num_requested=4))

    open_with(log, 0)
    actor = start(log, play=play)
    await until(lambda: groups_in(log))
    (group,) = groups_in(log)
    assert (list(group.played), group.played.counts, group.played.failures) == ([], counts, failures)
    await cancel(actor)


@in_virtual_time
async def test_an_error_that_may_pass_is_tried_again_three_times(log):
    tries = {0: 0, 1: 0}

    async def play(work):
        tries[work.number] += 1
        if work.number == 1 or tries[0] < 3:
            raise OSError("connection reset")
        return sample(work)

    open_with(log, 0, 1)
    actor = start(log, play=play)
    await until(lambda: len(groups_in(log)) == 2)
    assert tries == {0: 3, 1: 3}
    assert [len(group.played) for group in groups_in(log)] == [2, 0]
    assert groups_in(log)[1].played.failures[0].error == "OSError: connection reset"
    await cancel(actor)


@in_virtual_time
async def test_what_cannot_be_sent_is_delivered_as_failed(log):
    async def play(work):
        rollouts = sample(work)
        rollouts[0].steps[0].reward = float("nan")
        return rollouts

    open_with(log, 0)
    actor = start(log, play=play)
    await until(lambda: groups_in(log))
    assert "must be a finite number" in groups_in(log)[0].played.failures[0].error
    await cancel(actor)


@in_virtual_time
async def test_a_group_whose_actors_died_three_times_is_not_played(log):
    open_with(log, 0)
    for _ in range(3):
        log.lease("dead", lease_s=1)
        await asyncio.sleep(2)
    actor = start(log, play=None)
    await until(lambda: groups_in(log))
    (group,) = groups_in(log)
    assert (group.attempt, list(group.played)) == (3, [])
    assert "ran out 3 times" in group.played.failures[0].error
    await cancel(actor)


@in_virtual_time
async def test_weights_that_cannot_be_loaded_give_the_group_back_and_waits_grow(log):
    tried = []

    async def weights(version):
        tried.append(log.clock())
        if len(tried) < 4:
            raise OSError("no such file")

    open_with(log, 0)
    actor = start(log, weights=weights)
    await until(lambda: groups_in(log))
    waits = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert waits == pytest.approx([2, 4, 8], abs=0.5)
    assert groups_in(log)[0].attempt == 0
    await cancel(actor)


@in_virtual_time
async def test_a_log_that_is_away_for_a_while_costs_no_group(log):
    async def play(work):
        await asyncio.sleep(10)
        return sample(work)

    open_with(log, 0)
    actor = start(log, play=play, lease_s=6)
    await until(lambda: log.stats().leased)
    fail, log.fail = log.fail, unreachable
    await asyncio.sleep(200)
    log.fail = fail
    await until(lambda: groups_in(log))
    await cancel(actor)
    log.fail = unreachable
    with pytest.raises(QueueError, match="leasing a group: gave up"):
        await start(log)


@in_virtual_time
async def test_data_that_are_lost_meanwhile_cost_the_group(log):
    open_with(log, 0)
    plays = asyncio.Event()

    async def play(work):
        await plays.wait()
        return sample(work)

    actor = start(log, play=play)
    await until(lambda: log.stats().leased)
    log.lose_data()
    plays.set()
    await asyncio.sleep(1)
    assert groups_in(log) == []
    open_with(log, 0)
    await until(lambda: groups_in(log))
    await cancel(actor)


def test_settings_that_make_no_sense_are_named():
    with pytest.raises(ConfigError, match="lease_s"):
        asyncio.run(run_actor(None, play=None, weights=None, actor="a", lease_s=0))


def test_a_wait_is_looked_at_after_a_fiftieth_of_its_time():
    assert [poll_after(waited_s) for waited_s in (0.0, 0.5, 1.0, 2.5, 5.0, 600.0)] == [0.02, 0.02, 0.02, 0.05, 0.1, 0.1]
