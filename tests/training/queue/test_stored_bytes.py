"""Bytes that the first version of each form wrote are read by this one, or refused with its name:
queues outlive the ludic that wrote them."""

from dataclasses import replace

import numpy as np
import pytest

from ludic.training.queue.entries import EntryError, Group, decode_group, decode_samples, encode_group
from ludic.training.rollouts.episodes import EpisodeFailure, PlayedRollouts, RolloutCounts
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


def test_a_group_of_a_queue():
    group = decode_group(GROUP)
    assert (group.run, group.number, group.version, group.attempt, group.actor) == ("run", 7, 3, 1, "actor0")
    assert (group.generation_s, group.ended_s) == (1.5, 2.5)
    assert list(group.played) == ROLLOUTS
    assert (group.played.counts, group.played.failures) == (RolloutCounts(2, 1, 0, 0, 0), [FAILURE])
    assert group.played.num_requested == 3
    played = PlayedRollouts(ROLLOUTS, RolloutCounts(2, 1, 0, 0, 0), [ANSWERED], num_requested=3)
    newer = Group("run", 7, 3, 1, "actor0", 1.5, 2.5, played)
    # behind the checksum, three things differ: the failure has 8 fields and not 6, with its two
    # texts; a trace 8 and not 4, without candidates, with the number of shared ids, no images and
    # no routes; and the group 12 and not 11, with the bytes of no image
    traces = b"\x9c" + GROUP[23:-18].replace(b"\x94\xc4", b"\x98\xc4")
    ends = ((b"\xa4stop", b"\x09", b"\x00"), (b"\xc0", b"\x0a\x9a", b"\x00"), (b"\xc0\xc0", b"\x0b", b"\x03"))
    for end, number, shared in ends:  # and the step's number after it
        assert traces.count(end + number) == 1
        traces = traces.replace(end + number, end + b"\xc0" + shared + b"\x90\xc0" + number)
    whole = np.array([5, 6, 8, 150000], "<i4").tobytes()  # of which the step before has the first 3
    assert traces.count(b"\xc4\x10" + whole) == 1
    traces = traces.replace(b"\xc4\x10" + whole, b"\xc4\x04" + whole[12:])
    assert encode_group(newer)[22:] == traces + b"\x98" + GROUP[-17:] + b"\xa42+2=\xa16" + b"\x80"
    assert decode_group(encode_group(newer)).played.failures == [ANSWERED]
    with pytest.raises(EntryError, match=r"entry has version 5, .*reads 4"):
        decode_group(GROUP[:4] + b"\x05" + GROUP[5:])


def test_samples_of_a_queue_in_the_first_form_are_refused_with_both_versions():
    with pytest.raises(EntryError, match=r"entry has version 1, .*reads 4"):
        decode_samples(SAMPLES)
