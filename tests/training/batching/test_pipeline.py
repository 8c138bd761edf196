"""Actors and a trainer that meet at a queue. Most tests use a queue in memory; those with a real
server are marked."""

import asyncio
import copy
import re
import sys
import threading

import pytest
from hypothesis import given, settings, strategies as st
from memory_log import Clock, MemoryLog
from playing import FOR_RL, Counting, ScriptedClient, protocol

from ludic.errors import ConfigError, MissingExtraError, OwnershipLost, QueueError, QueueRefused, RequestsExhausted
from ludic.training import (
    EnvSpec,
    EpisodicReturn,
    GroupNormalizedReturn,
    GRPORequestStrategy,
    PipelineBatchSource,
    ProtocolSpec,
    RolloutEngine,
    RolloutRequest,
    SAWBatch,
    SAWItem,
    run_pipeline_actor,
)
from ludic.training.batching import pipeline
from ludic.training.queue.entries import SampleGroup, encode_samples


def item(name, *, rollout="r", reward=1.0, group=None):
    request_meta = {} if group is None else {"request_meta": {"group_id": group}}
    meta = {"rollout_id": rollout, "total_reward": reward, "name": name, **request_meta}
    return SAWItem([1, 2], [1, 1], [0, 1], 1.0, meta)


def memory_log():
    return MemoryLog(Clock())


def source_of(log, batch_size=1, **changes):
    return PipelineBatchSource("", batch_size=batch_size, log=log, **{"poll_timeout": 0.001, "wait_s": 5.0, **changes})


def send(log, sequence, *names, producer="p"):
    payload = encode_samples(SampleGroup(producer, sequence, [item(name, rollout=name) for name in names]))
    assert log.push(payload, max_entries=10**6)


def names(batch):
    return [item.meta["name"] for item in batch.items]


class Engine:
    """Returns these batches of items in turn; an exception among them is raised."""

    def __init__(self, *batches):
        self.batches, self.calls = list(batches), []

    async def generate_batch(self, **arguments):
        self.calls.append(arguments)
        batch = self.batches.pop(0)
        if isinstance(batch, BaseException):
            raise batch
        return SAWBatch(copy.deepcopy(batch))


class Versions:
    def __init__(self, *versions):
        self.versions = list(versions)

    async def get_policy_version(self):
        return self.versions.pop(0)


async def act(engine, log, **settings):
    """Run an actor until its engine has no more batches."""
    engine.batches.append(RequestsExhausted("done"))
    await asyncio.wait_for(run_pipeline_actor(engine, list, EpisodicReturn(), "", log=log, **settings), timeout=20)


# ---- batches -------------------------------------------------------------------------------------


async def test_a_batch_has_whole_groups_and_counts_its_rollouts():
    log = memory_log()
    groups = [
        [item("a", rollout="r1", reward=1.0, group=1), item("b", rollout="r1", reward=1.0, group=1)],
        [item("c", rollout="r2", reward=0.0, group=2), item("d", rollout="r3", reward=2.0, group=2)],
    ]
    await act(Engine(groups[0] + groups[1]), log, client=Versions(7, 7))
    source = source_of(log, batch_size=3)
    batch = await source.next_batch()
    assert names(batch) == ["a", "b", "c", "d"]  # 3 samples would divide the second group
    expected = {"target_rollouts": 3, "num_samples": 4, "avg_total_reward": 1.0, "source": "pipeline_redis"}
    assert {key: batch.meta[key] for key in expected} == expected
    assert {each.meta["policy_version"] for each in batch.items} == {7}


async def test_groups_are_never_divided_and_come_in_the_order_in_which_they_were_sent():
    log = memory_log()
    for sequence in range(5):
        send(log, sequence, f"{sequence}x", f"{sequence}y")
    source = source_of(log, batch_size=3)
    assert [names(await source.next_batch()) for _ in range(2)] == [["0x", "0y", "1x", "1y"], ["2x", "2y", "3x", "3y"]]


async def test_samples_of_a_real_engine_arrive_as_it_made_them():
    engine = RolloutEngine(env_registry={"e": Counting}, protocol_registry={"p": lambda: protocol(ScriptedClient("x", "y"))})
    group = GRPORequestStrategy(2).expand([RolloutRequest(EnvSpec("e"), ProtocolSpec("p"), env_seed=3, inference=FOR_RL)])
    made = []

    class Watched:
        async def generate_batch(self, **arguments):
            made.append(await engine.generate_batch(**arguments))
            return made[-1]

    requests = [group, group]

    def next_requests():
        if not requests:
            raise RequestsExhausted("done")
        return requests.pop()

    log = memory_log()
    await run_pipeline_actor(
        Watched(), next_requests, GroupNormalizedReturn(2), "", log=log, max_steps=2, client=Versions(1, 2, 3)
    )
    source = source_of(log, batch_size=2)
    for version in (1, 2):
        batch = await source.next_batch()
        assert batch.items == made[version - 1].items
        assert [each.meta["policy_version"] for each in batch.items] == [version] * 2


# ---- actors --------------------------------------------------------------------------------------


async def test_the_version_is_that_of_the_weights_that_the_requests_brought():
    log, client = memory_log(), Versions(1)

    def requests():
        client.versions = [2]  # a function that loads new weights first
        return []

    engine = Engine([item("a")], RequestsExhausted("done"))
    await run_pipeline_actor(engine, requests, EpisodicReturn(), "", log=log, client=client)
    assert (await source_of(log).next_batch()).items[0].meta["policy_version"] == 2


async def test_an_actor_passes_its_settings_to_the_engine():
    engine, credit = Engine([item("a")], RequestsExhausted("done")), EpisodicReturn()
    await run_pipeline_actor(engine, lambda: ["request"], credit, "", max_steps=3, concurrency=9, log=memory_log())
    assert engine.calls[0] == {"requests": ["request"], "max_steps": 3, "credit_assigner": credit, "concurrency": 9}


async def test_errors_are_logged_and_the_actor_goes_on_after_a_pause(monkeypatch, caplog):
    pauses, sleep = [], asyncio.sleep

    async def record(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(pipeline.asyncio, "sleep", record)
    log = memory_log()
    await act(Engine([item("a")], RuntimeError("the engine broke"), [item("b")]), log)
    assert pauses.count(1.0) == 1
    assert "the engine broke" in caplog.text
    assert names(await source_of(log, batch_size=2).next_batch()) == ["a", "b"]


async def test_a_version_that_the_sampler_gave_is_kept():
    log, exact = memory_log(), item("a")
    exact.meta["policy_version"] = 4
    await act(Engine([exact, item("b", rollout="s")]), log)  # no client: 0
    batch = await source_of(log, batch_size=2).next_batch()
    assert [each.meta["policy_version"] for each in batch.items] == [4, 0]


async def test_an_actor_waits_while_the_queue_is_full_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(pipeline, "FULL_S", 0.001)
    log, engine = memory_log(), Engine(*([item(str(i), rollout=str(i))] for i in range(6)))
    actor = asyncio.create_task(act(engine, log, max_entries=2))
    source, got = source_of(log), []
    for _ in range(4):
        got.append(names(await source.next_batch()))
        assert log.stats().entries - len(got) <= 2  # it waits for what is not trained, not for checkpoints
    source.state_dict()
    await source.checkpoint_saved()
    assert log.stats().entries <= 2
    got += [names(await source.next_batch()) for _ in range(2)]
    await actor
    assert got == [[str(i)] for i in range(6)]


async def test_a_queue_that_cannot_be_reached_costs_nothing(monkeypatch, caplog):
    monkeypatch.setattr(pipeline, "RETRY_S", 0.001)
    failures = [QueueError("gone"), None, QueueError("gone"), QueueError("gone"), None]

    def fail(call):
        if call == "push" and failures and (error := failures.pop(0)):
            raise error

    log = MemoryLog(Clock(), fail=fail)
    await act(Engine([item("a")], [item("b")]), log)
    assert names(await source_of(log, batch_size=2).next_batch()) == ["a", "b"]
    assert caplog.text.count("samples could not be sent: gone") == 3


async def test_what_the_server_refuses_ends_the_actor():
    def refuse(call):
        if call == "push":
            raise QueueRefused("wrong password")

    with pytest.raises(QueueRefused, match="wrong password"):
        await asyncio.wait_for(act(Engine([item("a")]), MemoryLog(Clock(), fail=refuse)), timeout=10.0)


async def test_what_cannot_be_sent_is_logged_and_left_out(caplog):
    log, bad = memory_log(), item("a")
    bad.weight = float("nan")
    await act(Engine([bad], [item("b")]), log)
    assert names(await source_of(log).next_batch()) == ["b"]
    assert re.search("group of 1 samples .*sample 0: weight is NaN", caplog.text)


async def test_an_actor_ends_when_it_is_cancelled_while_the_queue_is_full():
    log, engine = memory_log(), Engine(*([item("a")] for _ in range(9)))
    actor = asyncio.create_task(run_pipeline_actor(engine, list, EpisodicReturn(), "", log=log, max_entries=1))
    async with asyncio.timeout(30):
        while len(engine.batches) > 7:  # the second batch has no room
            await asyncio.sleep(0.001)
    actor.cancel()
    with pytest.raises(asyncio.CancelledError):
        await actor
    assert log.stats().entries == 1


# ---- resuming ------------------------------------------------------------------------------------


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_a_killed_trainer_trains_each_group_once(data):
    """Three producers send groups, some of them twice, some bad. The trainer is killed at any time
    and goes on from its last checkpoint. In the history that ends in the last weights, each
    producer's groups come once and in order, and none is missing."""
    log, sent, queued = memory_log(), dict.fromkeys("pqr", 0), []
    source, trained, checkpoint = source_of(log), [], (None, [])

    def push():
        producer = data.draw(st.sampled_from("pqr"))
        send(log, sent[producer], f"{producer}{sent[producer]}", producer=producer)
        queued.append(f"{producer}{sent[producer]}")
        if data.draw(st.booleans()):
            send(log, sent[producer], "again", producer=producer)
        sent[producer] += 1

    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["push", "push", "bad", "train", "train", "save", "kill"]))
        if event == "push":
            push()
        elif event == "bad":
            log.push(b"nothing that can be trained", max_entries=10**6)
        elif event == "train" and len(trained) < len(queued):
            trained += names(asyncio.run(source.next_batch()))
        elif event == "save":
            checkpoint = (source.state_dict(), list(trained))
            if data.draw(st.booleans()):  # or it is killed after the checkpoint and before this
                asyncio.run(source.checkpoint_saved())
        elif event == "kill":
            source, trained = source_of(log), list(checkpoint[1])
            if checkpoint[0] is not None:
                source.load_state_dict(checkpoint[0])
    while len(trained) < len(queued):
        trained += names(asyncio.run(source.next_batch()))
    assert trained == queued


async def test_a_resumed_source_that_has_read_nothing_can_be_saved():
    """The queue still belongs to the killed one."""
    log = memory_log()
    send(log, 0, "0")
    killed = source_of(log)
    await killed.next_batch()
    resumed = source_of(log)
    resumed.load_state_dict(killed.state_dict())
    assert resumed.state_dict() == killed.state_dict()
    await resumed.checkpoint_saved()
    assert log.stats().entries == 1
    send(log, 1, "1")
    assert names(await resumed.next_batch()) == ["1"]
    resumed.state_dict()
    await resumed.checkpoint_saved()
    assert log.stats().entries == 0


async def test_what_no_checkpoint_needs_is_forgotten_and_only_that():
    log = memory_log()
    for sequence in range(6):
        send(log, sequence, str(sequence))
    source = source_of(log)
    for _ in range(3):
        await source.next_batch()
    state = source.state_dict()
    await source.next_batch()
    assert log.stats().entries == 6  # nothing is saved yet
    await source.checkpoint_saved()
    assert log.stats().entries == 3
    resumed = source_of(log)
    resumed.load_state_dict(state)
    assert [names(await resumed.next_batch()) for _ in range(3)] == [["3"], ["4"], ["5"]]


async def test_a_save_does_not_wait_for_a_queue_that_cannot_be_reached(caplog):
    refused = []

    def fail(name):
        if name == failing:
            refused.append(name)
            raise QueueError("the queue cannot be reached")

    failing = ""
    log = MemoryLog(Clock(), fail=fail)
    source = source_of(log, patience_s=3600.0)
    for sequence in range(4):
        send(log, sequence, str(sequence))
    await source.next_batch()
    source.state_dict()
    for call in ("forget", "announce"):
        failing = call
        await asyncio.wait_for(source.checkpoint_saved(), 30)
    assert refused == ["forget", "announce"]  # each was tried once
    assert caplog.text.count("checkpoint: the queue cannot be reached") == 2
    failing = ""
    assert names(await source.next_batch()) == ["1"]
    source.state_dict()
    await source.checkpoint_saved()
    assert log.stats().entries == 2
    assert log.version() == 0  # of what is in the queue, nothing is trained


async def test_without_checkpoints_a_few_trained_groups_are_kept(caplog):
    log = memory_log()
    source = source_of(log, keep=2)
    for sequence in range(6):
        send(log, sequence, str(sequence))
        await source.next_batch()
        assert log.stats().entries <= 2
    assert caplog.text == ""  # nobody can resume this run
    source.state_dict()
    for sequence in range(6, 9):
        send(log, sequence, str(sequence))
        await source.next_batch()
    assert caplog.text.count("holds more than 2 trained groups (keep)") == 1


@pytest.mark.parametrize(("call", "keep"), [("stats", 99), ("stats", 1), ("forget", 1), ("announce", 99)])
async def test_a_wait_that_is_cancelled_leaves_its_samples_for_the_next_batch_and_for_a_resume(call, keep):
    """A run that is asked to stop cancels its wait, in one of the calls after the samples came."""
    is_reached, entered = True, threading.Event()

    def fail(name):
        if name == call and not is_reached:
            entered.set()
            raise QueueError("the queue cannot be reached")

    log = MemoryLog(Clock(), fail=fail)
    for sequence in range(6):
        send(log, sequence, str(sequence))
    source = source_of(log, batch_size=2, keep=keep)
    assert [names(await source.next_batch()) for _ in range(2)] == [["0", "1"], ["2", "3"]]
    is_reached = False
    waiting = asyncio.create_task(source.next_batch())
    async with asyncio.timeout(20):
        while not entered.is_set():
            await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    is_reached, state = True, source.state_dict()
    assert names(await source.next_batch()) == ["4", "5"]
    resumed = source_of(log, batch_size=2, keep=keep)
    resumed.load_state_dict(state)
    assert names(await resumed.next_batch()) == ["4", "5"]


# ---- failures ------------------------------------------------------------------------------------


async def test_what_is_no_group_is_set_aside_with_its_reason(caplog):
    log = memory_log()
    log.push(b"\x80\x04cposix\nsystem\n", max_entries=9)
    send(log, 0, "good")
    batch = await source_of(log).next_batch()
    assert names(batch) == ["good"]
    assert batch.meta["queue/aside"] == 1
    [kept] = log.aside()
    assert re.search("16 bytes, .*less than its header", kept.reason)
    assert re.search("set aside: .*16 bytes", caplog.text)


async def test_lost_data_cost_only_what_was_in_the_queue(caplog):
    log = memory_log()
    for sequence in range(4):
        send(log, sequence, str(sequence))
    source = source_of(log)
    assert names(await source.next_batch()) == ["0"]
    source._waiting.clear()  # as if one entry had been read at a time
    while len(source._entries) > 1:
        source._entries.pop()
    source._newest = dict(source._trained)
    log.lose_data()
    send(log, 4, "4")
    assert names(await source.next_batch()) == ["4"]
    assert "has lost its data" in caplog.text
    state = source.state_dict()
    await source.checkpoint_saved()
    send(log, 5, "5")
    resumed = source_of(log)
    resumed.load_state_dict(state)
    assert names(await resumed.next_batch()) == ["5"]


async def test_samples_that_were_read_outlive_lost_data():
    log = memory_log()
    for sequence in range(3):
        send(log, sequence, str(sequence))
    source = source_of(log)
    await source.next_batch()
    log.lose_data()
    assert [names(await source.next_batch()) for _ in range(2)] == [["1"], ["2"]]
    send(log, 3, "3")
    assert names(await source.next_batch()) == ["3"]
    state = source.state_dict()
    await source.checkpoint_saved()
    assert log.stats().entries == 0
    source.load_state_dict(state)
    send(log, 4, "4")
    assert names(await source.next_batch()) == ["4"]


async def test_a_second_trainer_takes_the_queue_over():
    log = memory_log()
    first, second = source_of(log), source_of(log)
    for sequence in range(3):
        send(log, sequence, str(sequence))
    await first.next_batch()
    assert names(await second.next_batch()) == ["0"]
    with pytest.raises(OwnershipLost):
        [await first.next_batch() for _ in range(3)]


async def test_waiting_for_actors_ends():
    with pytest.raises(QueueError, match=r"queue 'ludic_queue' for 0.05 s; .*actors running"):
        await source_of(memory_log(), wait_s=0.05).next_batch()


async def test_the_event_loop_goes_on_while_a_source_waits():
    class Slow(MemoryLog):
        def read(self, after, **settings):
            assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=60) is None  # the loop answers
            return MemoryLog.read(self, after, **settings)

    loop, log = asyncio.get_running_loop(), Slow(Clock())
    send(log, 0, "a")
    assert names(await source_of(log).next_batch()) == ["a"]


# ---- construction --------------------------------------------------------------------------------


def test_without_redis_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name == "redis" or name.startswith("ludic.training.queue.redis")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"ludic-rl\[redis\]") as caught:
        PipelineBatchSource("redis://localhost")
    assert isinstance(caught.value, ImportError)


async def test_an_empty_url_is_read_from_the_environment(monkeypatch):
    monkeypatch.delenv("LUDIC_QUEUE_URL", raising=False)
    with pytest.raises(ConfigError, match="LUDIC_QUEUE_URL"):
        PipelineBatchSource("")
    monkeypatch.setenv("LUDIC_QUEUE_URL", "redis://:secret@127.0.0.1:1")
    source = PipelineBatchSource("", "mine", patience_s=0.1)
    assert repr(source._log) == "RedisLog('redis://***@127.0.0.1:1', 'mine')"


@pytest.mark.parametrize("setting", ["batch_size", "poll_timeout", "keep", "wait_s"])
def test_settings_must_be_positive(setting):
    with pytest.raises(ConfigError, match=rf"{setting} \(0\) must be above 0"):
        PipelineBatchSource("", log=memory_log(), **{setting: 0})


# ---- a real server -------------------------------------------------------------------------------


@pytest.mark.integration
async def test_actors_and_trainer_meet_at_a_real_server(redis_server):
    engines = [
        Engine(*([item(f"{name}{i}", rollout=f"{name}{i}")] for i in range(10)), RequestsExhausted("done")) for name in "ab"
    ]
    actors = [run_pipeline_actor(engine, list, EpisodicReturn(), redis_server.url, "real") for engine in engines]
    source = PipelineBatchSource(redis_server.url, "real", batch_size=5)
    running = asyncio.gather(*actors)
    batches = [await source.next_batch() for _ in range(2)]
    state = source.state_dict()
    lost = await source.next_batch()  # trained by a process that is killed before its checkpoint
    resumed = PipelineBatchSource(redis_server.url, "real", batch_size=5)
    resumed.load_state_dict(state)
    batches += [await resumed.next_batch() for _ in range(2)]
    await running
    assert names(batches[2]) == names(lost)
    trained = [name for batch in batches for name in names(batch)]
    assert sorted(trained) == sorted(f"{name}{i}" for name in "ab" for i in range(10))
    assert [name for name in trained if name[0] == "a"] == [f"a{i}" for i in range(10)]
    for each in (source, resumed):
        await each.aclose()
