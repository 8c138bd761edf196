"""The trainer's source: what it offers and when, what it refuses, and which waits end."""

import asyncio
import copy
import json
import re
from dataclasses import replace

import pytest
from image_spans import draw_picture
from memory_log import MemoryLog, unreachable
from queue_runs import Plan, batch_of, in_virtual_time, sample, simulate, virtual_patience

from ludic.errors import CheckpointError, ConfigError, OwnershipLost, QueueError, RolloutError
from ludic.images.store import ImageStore, use_store
from ludic.training.queue import entries
from ludic.training.queue.arrivals import failed_group
from ludic.training.queue.base import Work
from ludic.training.queue.entries import Group, as_played, encode_group
from ludic.training.queue.source import QueueBatchSource
from ludic.types import ImageSpan, TokenTrace


def make_source(log, **options):
    options = {"groups_per_batch": 2, "run": "r", "to_batch": batch_of, "claim_s": 1e6, **options}
    return QueueBatchSource(log, patience=virtual_patience(), **options)


def deliver(log, number=None, *, payload=None, run=None, failure=None):
    """Play the next group that is free, as an actor does."""
    lease = log.lease("a")
    assert lease is not None
    assert number in (None, lease.work.number)
    work = lease.work
    group = Group(run or lease.run, work.number, work.version, work.attempt, "a", played=as_played(sample(work)))
    if failure is not None:
        group = failed_group(lease.run, work.number, work.version, failure)
    assert log.deliver(lease, encode_group(group) if payload is None else payload)


def offered(log):
    return [(each.work.number, each.work.version) for each in log.outstanding()]


@in_virtual_time
async def test_batches_are_offered_ahead_with_the_version_announced_last(log):
    source = make_source(log, ahead=1)
    first = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    assert offered(log) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    deliver(log), deliver(log)
    await first
    await source.announce(1)
    assert log.version() == 1
    second = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    assert offered(log) == [(2, 0), (3, 0), (4, 1), (5, 1)]
    deliver(log), deliver(log)
    assert (await second).meta["numbers"] == [2, 3]
    await source.aclose()


@in_virtual_time
async def test_nothing_is_offered_beyond_the_end_of_the_run(log):
    source = make_source(log, ahead=5, num_batches=2)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    assert [number for number, _ in offered(log)] == [0, 1, 2, 3]
    deliver(log), deliver(log)
    await waiting
    source.limit(0)
    waiting = asyncio.create_task(source.next_batch())  # asked for, so it is played
    await asyncio.sleep(0.5)
    deliver(log), deliver(log)
    await waiting
    await source.aclose()


@in_virtual_time
async def test_versions_are_rounded_down_to_those_that_are_published(log):
    source = make_source(log, publish_every=3)
    await source.announce(5)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    assert offered(log) == [(0, 3), (1, 3)]
    waiting.cancel()
    await source.aclose()


@in_virtual_time
async def test_a_resumed_source_goes_on_where_the_checkpoint_was(log):
    source = make_source(log, ahead=1)
    first = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    for _ in range(3):
        deliver(log)
    await first
    state = json.loads(json.dumps(source.state_dict()))
    await source.checkpoint_saved()
    assert [entry.number for entry in log.read(None)] == [2]  # 0 and 1 are forgotten, 2 is not
    again = make_source(log, ahead=1)
    again.load_state_dict(state)
    second = asyncio.create_task(again.next_batch())
    await asyncio.sleep(0.5)
    deliver(log, 3)
    assert (await second).meta["numbers"] == [2, 3]
    with pytest.raises(OwnershipLost):
        await source.announce(9)
    await again.aclose()
    await source.aclose()


async def train(log, source, steps):
    """Take this many steps with one actor. Returns the groups that were trained."""
    numbers = []
    for step in range(steps):
        waiting = asyncio.create_task(source.next_batch())
        while not waiting.done():
            await asyncio.sleep(0.1)
            if log.stats().outstanding:
                deliver(log)
        numbers += waiting.result().meta["numbers"]
        await source.announce(step + 1)
    return numbers


@pytest.mark.parametrize("order", ["exact", "arrival"])
def test_a_resumed_run_offers_nothing_that_is_in_the_log(order):
    """Ten steps are trained again, from a log that has their groups. What is outstanding meanwhile
    would be leased first, and ask for weights that are deleted."""

    @in_virtual_time
    async def check(log):
        source = make_source(log, order=order, ahead=1)
        state = source.state_dict()
        numbers = await train(log, source, 10)
        delivered = {entry.number for entry in log.read(None, limit=100)}
        again = make_source(log, order=order, ahead=1)
        again.load_state_dict(state)
        redone = []
        for step in range(9):
            redone += (await again.next_batch()).meta["numbers"]
            assert not delivered & {number for number, _ in offered(log)}
            await again.announce(step + 1)
        assert redone == numbers[:18]
        await again.aclose()
        await source.aclose()

    check()


@in_virtual_time
async def test_a_resumed_run_plays_again_what_is_damaged_in_the_log_before_it_is_offered(log):
    """Of two damaged entries of a later batch, one has a good entry behind it."""
    source = make_source(log)
    state = source.state_dict()
    await train(log, source, 1)
    second = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    deliver(log, 2, payload=b"no entry")
    await asyncio.sleep(0.5)
    deliver(log, 2)
    deliver(log, 3, payload=b"no entry")
    second.cancel()
    again = make_source(log)
    again.load_state_dict(state)
    assert (await again.next_batch()).meta["numbers"] == [0, 1]
    await again.announce(1)
    waiting = asyncio.create_task(again.next_batch())
    await asyncio.sleep(3)
    assert offered(log) == [(3, 1)]
    deliver(log, 3)
    assert (await waiting).meta["numbers"] == [2, 3]
    await again.aclose()
    await source.aclose()


@in_virtual_time
async def test_work_of_a_trained_group_is_withdrawn(log):
    """A server that was restarted may have forgotten a delivery that was trained."""
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    before = copy.deepcopy(log.data)
    deliver(log), deliver(log)
    await waiting
    before.next_id = log.data.next_id  # a server's ids are times
    log.data = before
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    assert [number for number, _ in offered(log)] == [0, 1, 2, 3]
    await asyncio.sleep(6)
    assert [number for number, _ in offered(log)] == [2, 3]
    deliver(log), deliver(log)
    assert (await waiting).meta["numbers"] == [2, 3]
    await source.aclose()


@in_virtual_time
async def test_a_resumed_run_withdraws_what_only_later_batches_need(log):
    """The trainer was at batch 3, and had offered 4. Batch 1 is offered with batch 0, so its work
    stays, and the lease of an actor that plays it."""
    source = make_source(log, ahead=1)
    state = source.state_dict()
    log.claim("trainer before", run="r")
    log.offer("trainer before", [Work(number, 0) for number in (2, 3, 8, 9)])
    lease = log.lease("a")
    source.load_state_dict(state)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    assert [number for number, _ in offered(log)] == [0, 1, 2, 3]
    assert log.renew(lease)
    waiting.cancel()
    await source.aclose()


@in_virtual_time
async def test_a_wait_that_is_cancelled_at_any_moment_leaves_a_batch_whole(log):
    """The wait ends while the queue's numbers are asked for, or the batch is made: the batch is not
    trained, and the next call returns it."""
    source = make_source(log, groups_per_batch=1)
    for batch in range(40):
        waiting = asyncio.create_task(source.next_batch())
        while not log.outstanding():
            await asyncio.sleep(0.001)
        deliver(log)
        await asyncio.sleep(0.001 * batch)
        is_done = waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert source.state_dict()["batch"] == batch + is_done
        if not is_done:
            assert (await source.next_batch()).meta["numbers"] == [batch]
    await source.aclose()


@in_virtual_time
async def test_entries_that_cannot_be_trained_on_are_set_aside_and_played_again(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    deliver(log, 0, payload=b"no entry")
    deliver(log, 1, run="another")
    await asyncio.sleep(3)
    assert [each.work for each in log.outstanding()] == [Work(0, 0, attempt=1), Work(1, 0, attempt=1)]
    deliver(log, 0), deliver(log, 1)
    meta = (await waiting).meta
    assert meta["numbers"] == [0, 1]
    short, foreign = (kept.reason for kept in log.aside())
    assert re.search("8 bytes, .*less than its header", short)
    assert re.search("run another, .*is r$", foreign)
    assert (meta["queue/aside"], meta["queue/abandoned"]) == (2, 0)
    await source.aclose()


@in_virtual_time
async def test_a_group_that_is_refused_three_times_is_missing_in_its_batch(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    for _ in range(3):
        await asyncio.sleep(3)
        deliver(log, 0, payload=b"no entry")
    await asyncio.sleep(3)
    deliver(log, 1)
    batch = await waiting
    assert batch.meta["numbers"] == [0, 1]
    assert (batch.meta["queue/aside"], batch.meta["queue/abandoned"]) == (3, 1)
    assert source.state_dict()["ledger"]["watermark"] == 2
    await source.aclose()


@in_virtual_time
async def test_a_batch_without_any_rollouts_is_an_error_that_names_the_first_failure(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    deliver(log, failure="the environment broke"), deliver(log, failure="too")
    with pytest.raises(RolloutError, match=r"2 groups of batch 0 failed; .*environment broke"):
        await waiting
    await source.aclose()


@in_virtual_time
async def test_a_run_that_ended_with_a_batch_of_failures_can_be_resumed(log):
    """The groups that failed are played again, and what comes after them is still there."""
    source = make_source(log, ahead=1)
    state = source.state_dict()
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    deliver(log, failure="the disk was full"), deliver(log, failure="too")
    with pytest.raises(RolloutError, match="mend the first error and resume"):
        await waiting
    deliver(log, 2)
    await source.aclose()
    again = make_source(log, ahead=1)
    again.load_state_dict(state)
    waiting = asyncio.create_task(again.next_batch())
    await asyncio.sleep(0.5)
    assert [number for number, _ in offered(log)] == [0, 1, 3]
    deliver(log, 0), deliver(log, 1)
    assert (await waiting).meta["numbers"] == [0, 1]
    await again.aclose()


@in_virtual_time
async def test_a_batch_of_failures_is_the_error_also_while_the_log_cannot_be_reached(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    log.fail = lambda call: unreachable(call) if call == "forget" else None
    deliver(log, failure="the environment broke"), deliver(log, failure="too")
    since = log.clock()
    with pytest.raises(RolloutError, match="the environment broke"):
        await waiting
    assert log.clock() - since < 5
    await source.aclose()


@in_virtual_time
async def test_a_saved_checkpoint_does_not_wait_for_a_log_that_cannot_be_reached(log):
    source = make_source(log)
    await train(log, source, 1)
    source.state_dict()
    fail, log.fail, since = log.fail, unreachable, log.clock()
    await source.checkpoint_saved()
    assert log.clock() - since < 5
    log.fail = fail
    assert len(log.read(None)) == 2
    await source.checkpoint_saved()
    assert log.read(None) == []
    log.claim("other", run="r")
    with pytest.raises(OwnershipLost):
        await source.checkpoint_saved()
    await source.aclose()


@in_virtual_time
async def test_work_is_offered_again_with_the_version_that_replaces_a_deleted_one(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    state = source.state_dict()
    waiting.cancel()
    assert offered(log) == [(0, 0), (1, 0)]
    again = make_source(log)
    again.load_state_dict({**state, "version": 3, "versions": [[0, 3]]})
    waiting = asyncio.create_task(again.next_batch())
    await asyncio.sleep(0.5)
    assert offered(log) == [(0, 3), (1, 3)]
    deliver(log), deliver(log)
    await waiting
    await again.aclose()
    await source.aclose()


@in_virtual_time
async def test_a_wait_that_is_cancelled_loses_no_entry(log):
    """An actor's group is read and then the wait is cancelled, at each moment of its decoding."""
    source = make_source(log, groups_per_batch=1)
    for batch in range(40):
        waiting = asyncio.create_task(source.next_batch())
        while not log.outstanding():
            await asyncio.sleep(0.001)
        deliver(log)
        await asyncio.sleep(0.001 * batch)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if source.state_dict()["batch"] == batch:
            assert (await source.next_batch()).meta["numbers"] == [batch]
    assert source.state_dict()["ledger"] == {"watermark": 40, "above": []}
    await source.aclose()


@in_virtual_time
async def test_a_group_that_is_nowhere_is_offered_again_after_five_seconds(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    deliver(log)
    log.withdraw(source.owner, [1])
    await asyncio.sleep(4)
    assert offered(log) == []
    await asyncio.sleep(2)
    assert offered(log) == [(1, 0)]
    deliver(log)
    await waiting
    await source.aclose()


@in_virtual_time
async def test_lost_data_are_offered_again_also_what_was_delivered_and_not_read(log):
    source = make_source(log, ahead=1)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    deliver(log, 0)
    await asyncio.sleep(0.5)  # group 0 is read
    deliver(log, 1)
    log.lose_data()
    await asyncio.sleep(7)
    assert [number for number, _ in offered(log)] == [1, 2, 3]
    deliver(log, 1)
    assert (await waiting).meta["numbers"] == [0, 1]
    await source.aclose()


@in_virtual_time
async def test_another_trainer_that_claims_the_log_ends_this_one(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    log.claim("other", run="r")
    with pytest.raises(OwnershipLost, match="other"):
        await waiting
    await source.aclose()


@in_virtual_time
async def test_a_log_that_cannot_be_reached_is_an_error_after_the_patience(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    log.fail, since = unreachable, log.clock()
    with pytest.raises(QueueError, match=r"30\d s \(patience_s 300\): .*cannot be reached"):
        await waiting
    assert 300 <= log.clock() - since < 310
    await source.aclose()


@in_virtual_time
async def test_a_log_that_comes_back_costs_nothing(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    fail, log.fail = log.fail, unreachable
    await asyncio.sleep(200)
    log.fail = fail
    deliver(log), deliver(log)
    assert (await waiting).meta["numbers"] == [0, 1]
    await source.aclose()


@in_virtual_time
async def test_a_wait_without_actors_ends_after_the_patience(log):
    with pytest.raises(QueueError, match=r"batch 0 .*groups 0, 1: .*30\d s .*actors running"):
        await make_source(log).next_batch()


@in_virtual_time
async def test_a_wait_for_an_actor_that_never_delivers_ends_too(log):
    source = make_source(log, group_timeout_s=400)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    log.lease("a", lease_s=1e6)
    with pytest.raises(QueueError, match=r"have work, .*none was delivered for 40\d s"):
        await waiting
    await source.aclose()


@in_virtual_time
async def test_a_group_of_another_version_is_played_again_in_order_exact(log):
    source = make_source(log)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    lease = log.lease("a")
    log.deliver(lease, encode_group(Group("r", 0, 7, played=as_played(sample(lease.work)))))
    await asyncio.sleep(8)
    assert offered(log) == [(0, 0), (1, 0)]
    deliver(log, 0), deliver(log, 1)
    assert (await waiting).meta["numbers"] == [0, 1]
    await source.aclose()


@in_virtual_time
async def test_closing_ends_the_actors_and_empties_the_log(log):
    source = make_source(log, ahead=3)
    waiting = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.5)
    deliver(log), deliver(log), deliver(log)
    await waiting
    await source.close_queue()
    assert log.is_closed()
    assert (log.read(None), log.outstanding()) == ([], [])


def test_metrics_say_what_the_queue_did():
    run = simulate(Plan(steps=10, calls_between_kills=100, seed=4))
    keys = {"depth", "outstanding", "oldest_s", "age_s", "wait_s", "claimed", "duplicates", "aside", "abandoned", "bytes"}
    for meta in run.metrics:
        assert {key.removeprefix("queue/") for key in meta if key.startswith("queue/")} == keys
        assert meta["queue/depth"] <= 4 * 3
        assert meta["queue/wait_s"] >= 0
    assert run.metrics[-1]["queue/claimed"] > 0


def test_damaged_entries_are_played_again_and_change_nothing():
    run = simulate(Plan(steps=10, bad_entries={3: 1, 7: 2}, max_attempts=3))
    assert run.weights == simulate(Plan(steps=10)).weights
    assert run.metrics[-1]["queue/aside"] == 3


@pytest.mark.parametrize("order", ["exact", "arrival"])
def test_no_group_is_trained_later_than_the_largest_lag(order):
    for seed in range(3):
        plan = Plan(order=order, ahead=1, num_actors=5, seed=seed)
        run = simulate(plan)
        lags = [step - max(0, number // 4 - plan.ahead) for step, numbers in run.trained.items() for number in numbers]
        assert max(lags) <= (plan.ahead if order == "exact" else plan.ahead + 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ahead": -1}, "ahead"),
        ({"ahead": 2, "max_lag": 2}, r"max_lag \(2\) must be > ahead \(2\)"),
        ({"publish_every": 0}, "publish_every"),
        ({"groups_per_batch": 0}, "groups_per_batch"),
    ],
)
def test_settings_that_make_no_sense_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        QueueBatchSource(MemoryLog(lambda: 0.0), **{"groups_per_batch": 2, "run": "r", "to_batch": batch_of, **options})


def test_a_state_of_another_run_is_refused():
    source = QueueBatchSource(MemoryLog(lambda: 0.0), groups_per_batch=2, run="r", to_batch=batch_of)
    state = source.state_dict()
    with pytest.raises(ConfigError, match="saved by a run without actors"):
        source.load_state_dict({"requests": {"position": 3}})
    with pytest.raises(ConfigError, match=r"4 groups in a batch, here .*2"):
        source.load_state_dict({**state, "groups_per_batch": 4})
    with pytest.raises(CheckpointError, match="no ledger"):
        source.load_state_dict({**state, "ledger": {}})


@in_virtual_time
async def test_an_entry_with_a_damaged_image_is_set_aside_with_its_name(log):
    sender, trainer = ImageStore(), ImageStore()
    digest = sender.add(draw_picture(0))
    source = make_source(log)
    with use_store(trainer):
        waiting = asyncio.create_task(source.next_batch())
        await asyncio.sleep(0.5)
        for is_damaged in (True, False, False):
            lease = log.lease("a")
            work = lease.work
            rollouts = sample(work)
            for rollout in rollouts:
                trace = TokenTrace([1, 9, 9], [2, 3], [-0.5, -0.25], images=(ImageSpan(digest, 1, 2),))
                rollout.steps[0] = replace(rollout.steps[0], trace=trace)
            with use_store(sender):
                group = Group(lease.run, work.number, work.version, work.attempt, "a", played=as_played(rollouts))
                payload = encode_group(group)
            if is_damaged:
                content = entries._DECODER.decode(payload[22:])
                content.images[digest] = content.images[digest][:-1] + b"\0"
                payload = entries.seal(entries.GROUP, content, entries.EntryLimits())
            assert log.deliver(lease, payload)
            await asyncio.sleep(3)
        assert (await waiting).meta["numbers"] == [0, 1]
        [aside] = log.aside()
        assert re.search(f"image '{digest}' of the entry is damaged", aside.reason)
        assert trainer.read(digest) == sender.read(digest)
        await source.aclose()
