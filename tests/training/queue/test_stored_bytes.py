"""Bytes that the first version of each form wrote are read by this one: queue files and checkpoints
outlive the ludic that wrote them."""

from dataclasses import replace

import numpy as np

from ludic.training.batching.overlapped import decode_batches, encode_batches
from ludic.training.queue.entries import Group, SampleGroup, decode_group, decode_samples, encode_group, encode_samples
from ludic.training.rollouts.episodes import EpisodeFailure, PlayedRollouts, RolloutCounts
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem
from ludic.types import Rollout, Step, TokenTrace

GROUP = bytes.fromhex(
    "4c5544510101c5d43c3fdf66ab24db5013d5bef7ad339ba372756e070301a66163746f7230cb3ff80000000000"
    "00cb40040000000000009293a2723082ac726571756573745f6d65746181a867726f75705f6964a26731ae706f"
    "6c6963795f76657273696f6e03919a00a4322b323da134c0cb3ff0000000000000c2c381ad66696e6973685f72"
    "6561736f6ea473746f7094c4080500000006000000c4080700000002000000c408000000bf000080bea473746f"
    "700993a2723181ac726571756573745f6d65746181a867726f75705f6964a26731929a00a4322b323da135a26e"
    "6fcb0000000000000000c2c28094c4080500000006000000c40408000000c4089a9999999999b9bfc00a9a01a2"
    "6e6fa0c0cb3fe0000000000000c3c28094c410050000000600000008000000f0490200c400c0c00b0395020100"
    "0000919601a4736f7274c0a774696d656f75740280"
)
SAMPLES = bytes.fromhex(
    "4c5544510102e5e0b55e7639decc5c9527631f06eaca93a86e6f6465312d3737059296c40c0500000006000000"
    "07000000c0c40160cb3fe000000000000082aa726f6c6c6f75745f6964a172ac746f74616c5f726577617264cb"
    "3ff0000000000000c408000000bf000080be96c40c0500000006000000f0490200c401a0c40120cbbfe0000000"
    "00000081aa726f6c6c6f75745f6964a173c4089a9999999999b9bf"
)
BATCHES = bytes.fromhex(
    "920191929296930506079301010193000101cb3fe000000000000082aa726f6c6c6f75745f6964a172ac746f74"
    "616c5f726577617264cb3ff000000000000092cbbfe0000000000000cbbfd00000000000009682a56474797065"
    "a33c6934a464617461c408050000000600000082a56474797065a37c7531a464617461c402010182a564747970"
    "65a37c7531a464617461c4020001cb3fd000000000000081a16ec082a56474797065a33c6634a464617461c404"
    "000000bf81ab6e756d5f73616d706c657302"
)
STEPS = [
    Step(0, "2+2=", "4", None, 1.0, False, True, {"finish_reason": "stop"}, TokenTrace([5, 6], [7, 2], [-0.5, -0.25], "stop"), 9),
    Step(0, "2+2=", "5", "no", 0.0, False, False, {}, TokenTrace([5, 6], [8], [-0.1], None), 10),
    Step(1, "no", "", None, 0.5, True, False, {}, TokenTrace([5, 6, 8, 150000], []), 11),
]
ROLLOUTS = [
    Rollout("r0", STEPS[:1], {"request_meta": {"group_id": "g1"}, "policy_version": 3}),
    Rollout("r1", STEPS[1:], {"request_meta": {"group_id": "g1"}}),
]
FAILURE = EpisodeFailure(1, "sort", None, "timeout", 2, {})
ANSWERED = replace(FAILURE, seen="2+2=", answer="6")
ITEMS = [
    SAWItem(
        [5, 6, 7],
        [1, 1, 1],
        [0, 1, 1],
        0.5,
        {"rollout_id": "r", "total_reward": 1.0},
        SampleAttachments(ActorTokenLogps([-0.5, -0.25])),
    ),
    SAWItem([5, 6, 150000], [1, 0, 1], [0, 0, 1], -0.5, {"rollout_id": "s"}, SampleAttachments(ActorTokenLogps([-0.1]))),
]


def test_a_group_of_a_queue():
    group = decode_group(GROUP)
    assert (group.run, group.number, group.version, group.attempt, group.actor) == ("run", 7, 3, 1, "actor0")
    assert (group.generation_s, group.ended_s) == (1.5, 2.5)
    assert list(group.played) == ROLLOUTS
    assert (group.played.counts, group.played.failures) == (RolloutCounts(2, 1, 0, 0, 0), [FAILURE])
    assert group.played.num_requested == 3
    played = PlayedRollouts(ROLLOUTS, RolloutCounts(2, 1, 0, 0, 0), [ANSWERED], num_requested=3)
    newer = Group("run", 7, 3, 1, "actor0", 1.5, 2.5, played)
    # behind the checksum, only the failure differs: 8 fields and not 6, and its two texts
    assert encode_group(newer)[22:] == GROUP[22:-18] + b"\x98" + GROUP[-17:] + b"\xa42+2=\xa16"
    assert decode_group(encode_group(newer)).played.failures == [ANSWERED]


def test_samples_of_a_queue():
    group = SampleGroup("node1-77", 5, ITEMS)
    assert decode_samples(SAMPLES) == group
    assert encode_samples(group) == SAMPLES


def test_batches_of_a_checkpoint():
    [batch] = decode_batches(BATCHES)
    assert batch.meta == {"num_samples": 2}
    assert batch.items[0] == ITEMS[0]
    arrays = batch.items[1]
    columns = [arrays.input_ids, arrays.attention_mask, arrays.action_mask, arrays.actor_logps.token_logps]
    assert [column.dtype for column in columns] == [np.int32, np.uint8, np.uint8, np.float32]
    assert [column.tolist() for column in columns] == [[5, 6], [1, 1], [0, 1], [-0.5]]
    assert (arrays.weight, arrays.meta) == (0.25, {"n": None})
    assert encode_batches([SAWBatch(batch.items, batch.meta)]) == BATCHES
