"""A trainer whose batches come through the queue: what it trains, saves, forgets and logs."""

import asyncio
import re
import time

import torch
from memory_log import MemoryLog
from training_samples import tiny_model

from ludic.training import CheckpointConfig, Trainer, TrainerConfig, make_grpo
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.queue.actor import run_actor
from ludic.training.queue.arrivals import failed_group
from ludic.training.queue.entries import Group, as_played
from ludic.training.queue.source import BatchFromGroups, QueueBatchSource, join_groups
from ludic.training.rollouts.log import RolloutLog, read_rollouts
from ludic.training.rollouts.to_samples import batch_from_rollouts
from ludic.types import Rollout, Step, TokenTrace

GROUPS, MEMBERS = 2, 3


def play_group(number, version):
    """Three answers to one prompt, which depend on the number and the version only."""
    rollouts = []
    for member in range(MEMBERS):
        tokens = [3 + (number + 2 * member + version) % 7, 4 + (number * member) % 5]
        trace = TokenTrace([3, 4 + number % 5], tokens, [-0.5 - member, -0.25], "stop")
        step = Step(0, "q", "a", None, float((number + member) % 3), False, True, trace=trace, ts_ns=0)
        rollouts.append(Rollout(f"{number}-{member}-{version}", [step], {"request_meta": {"group_id": f"g{number}"}}))
    return rollouts


def group(number, version=0):
    return Group("r", number, version, played=as_played(play_group(number, version)))


async def test_a_batch_of_groups_is_that_of_their_rollouts(tmp_path):
    assigner = GroupNormalizedReturn(group_size=MEMBERS)
    log = RolloutLog(tmp_path / "rollouts.jsonl")
    to_batch = BatchFromGroups(rollouts_per_group=MEMBERS, credit_assigner=assigner, log=log)
    batch = await to_batch([group(0), group(1)])
    rollouts = play_group(0, 0) + play_group(1, 0)
    expected = batch_from_rollouts(rollouts, assigner)
    assert batch.items == expected.items
    assert {key: batch.meta[key] for key in expected.meta} == expected.meta
    assert batch.meta["num_episodes"] == 2 * MEMBERS
    assert read_rollouts(tmp_path / "rollouts.jsonl") == rollouts


def test_a_failed_group_counts_as_many_rollouts_as_a_whole_one():
    joined = join_groups([group(0), failed_group("r", 1, 0, "broke")], MEMBERS)
    assert (len(joined), joined.num_requested) == (MEMBERS, 2 * MEMBERS)
    assert (joined.counts.num_dropped_groups, joined.counts.num_failed_episodes) == (1, 1)
    assert [failure.error for failure in joined.failures] == ["broke"]


class Announcing:
    """A publisher that tells actors of each version; their samples depend on its number."""

    def __init__(self, source):
        self.source = source

    async def publish(self, weights, version=None):
        await self.source.announce(version)


async def train(folder, log, steps, resume_from=None, play_group=play_group):
    """Train on the groups of an actor; returns the trainer and the statistics of its steps."""
    algo = make_grpo(group_size=MEMBERS)
    source = QueueBatchSource(
        log, run="r", groups_per_batch=GROUPS, ahead=1, to_batch=BatchFromGroups(rollouts_per_group=MEMBERS, algorithm=algo)
    )
    trainer = Trainer(
        model=tiny_model(),
        algo=algo,
        batch_source=source,
        publisher=Announcing(source),
        cfg=TrainerConfig(model_device="cpu", lr=1e-2, sync_every_steps=1),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=2, max_to_keep=3),
        resume_from=resume_from,
    )

    async def play(work):
        return play_group(work.number, work.version)

    async def weights(version):
        assert version <= trainer.current_step

    actor = asyncio.create_task(run_actor(log, play=play, weights=weights, actor="a", lease_s=10.0))
    lines = []
    try:
        await trainer.train(steps, log_fn=lines.append)
    finally:
        actor.cancel()
        await asyncio.gather(actor, return_exceptions=True)
        await source.aclose()
    return trainer, lines


def weights_of(trainer):
    return torch.cat([tensor.detach().flatten() for tensor in trainer.model.state_dict().values()])


async def test_a_resumed_run_ends_with_the_same_weights_and_forgets_what_is_saved(tmp_path):
    whole, lines = await train(tmp_path / "whole", MemoryLog(time.monotonic), 4)
    assert [line["train/num_samples"] for line in lines] == [GROUPS * MEMBERS] * 4
    assert [line["train/policy_lag"] for line in lines] == [0, 1, 1, 1]  # the first two batches are offered with version 0
    assert {"queue/depth", "queue/outstanding", "queue/age_s", "queue/wait_s", "queue/bytes"} <= set(lines[-1])
    log = MemoryLog(time.monotonic)
    await train(tmp_path / "cut", log, 3)  # saved after step 2, ended after step 3
    assert min(entry.number for entry in log.read(None, limit=100)) == 2 * GROUPS
    resumed, _ = await train(tmp_path / "cut", log, 2, resume_from=2)
    assert torch.equal(weights_of(whole), weights_of(resumed))


async def test_a_lost_queue_is_played_again_and_changes_nothing(tmp_path):
    whole, _ = await train(tmp_path / "whole", MemoryLog(time.monotonic), 4)
    await train(tmp_path / "cut", MemoryLog(time.monotonic), 3)
    resumed, _ = await train(tmp_path / "cut", MemoryLog(time.monotonic), 2, resume_from=2)
    assert torch.equal(weights_of(whole), weights_of(resumed))


async def test_ids_outside_the_vocabulary_are_set_aside_and_their_group_is_played_again(tmp_path):
    """Also where the run is resumed: nothing stops at the entry."""
    whole, _ = await train(tmp_path / "whole", MemoryLog(time.monotonic), 4)
    log, failed = MemoryLog(time.monotonic), set()

    def of_another_model(number, version):
        rollouts = play_group(number, version)
        if number in (1, 4) and number not in failed:
            failed.add(number)
            rollouts[1].steps[0].trace.completion_token_ids[0] = 5_000
        return rollouts

    await train(tmp_path / "cut", log, 3, play_group=of_another_model)
    resumed, lines = await train(tmp_path / "cut", log, 2, resume_from=2, play_group=of_another_model)
    reasons = {each.entry.number: each.reason for each in log.aside()}
    assert set(reasons) == {1, 4}
    assert all(re.search("step 0 of rollout .*token id 5000, ", said) for said in reasons.values())
    assert torch.equal(weights_of(whole), weights_of(resumed))
    assert [line["train/num_samples"] for line in lines] == [GROUPS * MEMBERS] * 2
