"""Groups as bytes: what is sent comes back, what is damaged is refused."""

import math
import random
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ludic.columns import Column
from ludic.errors import ConfigError
from ludic.training.queue import entries
from ludic.training.queue.base import Lease, Work
from ludic.training.queue.entries import (
    _DECODER,
    GROUP,
    SAMPLES,
    EntryError,
    EntryLimits,
    Group,
    as_played,
    decode_group,
    encode_group,
    seal,
)
from ludic.training.rollouts.episodes import EpisodeFailure, PlayedRollouts, RolloutCounts, SampleCheck
from ludic.types import Rollout, Step, TokenTrace, stored

TEXT = st.text(max_size=4)
LEAF = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
META = st.dictionaries(
    TEXT.map("x".__add__), LEAF | st.lists(LEAF, max_size=2) | st.dictionaries(TEXT, LEAF, max_size=2), max_size=2
)
FLOAT32 = st.floats(-50, 0, width=32)


@st.composite
def traces(draw):
    completion = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
    numbers = draw(st.sampled_from([FLOAT32, st.floats(-50, 0)]))
    logps = draw(st.none() | st.lists(numbers, min_size=len(completion), max_size=len(completion)))
    return TokenTrace(draw(st.lists(st.integers(0, 150_000), min_size=1, max_size=4)), completion, logps, draw(st.none() | TEXT))


@st.composite
def steps(draw, index):
    texts = [draw(TEXT), draw(TEXT), draw(st.none() | TEXT)]
    ends = [draw(st.booleans()), draw(st.booleans())]
    reward = draw(st.floats(allow_nan=False, allow_infinity=False, width=32) | st.integers(-5, 5))
    return Step(index, *texts, reward, *ends, draw(META), draw(traces()), draw(st.integers(0, 2**62)))


@st.composite
def episodes(draw):
    """The steps of an episode, some of which continue the one before."""
    played = []
    for index in range(draw(st.integers(0, 3))):
        step = draw(steps(index))
        if played and draw(st.booleans()):
            before, trace = played[-1].trace, step.trace
            ids = [*before.prompt_token_ids, *before.completion_token_ids, *trace.prompt_token_ids]
            step = replace(step, trace=replace(trace, prompt_token_ids=ids))
        played.append(step)
    return played


@st.composite
def groups(draw):
    rollouts = [Rollout(f"{i}-{draw(TEXT)}", draw(episodes()), draw(META)) for i in range(draw(st.integers(0, 3)))]
    played = draw(st.sampled_from([(), ("2+2=", ""), (draw(TEXT), draw(TEXT))]))
    failures = [EpisodeFailure(1, draw(TEXT), draw(st.none() | st.integers(0, 9)), draw(TEXT), 2, draw(META), *played)]
    counts = RolloutCounts(*draw(st.lists(st.integers(0, 9), min_size=5, max_size=5)))
    played = PlayedRollouts(rollouts, counts, draw(st.sampled_from([[], failures])), num_requested=draw(st.integers(0, 9)))
    return Group(
        draw(TEXT), draw(st.integers(0, 2**40)), draw(st.integers(0, 99)), draw(st.integers(0, 3)), draw(TEXT), 1.5, 2.5, played
    )


def as_sent(group):
    """The entry of a producer that checks nothing."""
    with mock.patch.object(entries, "_check_group"):
        return encode_group(group)


def facts(group):
    played = group.played
    head = (group.run, group.number, group.version, group.attempt, group.actor, group.generation_s, group.ended_s)
    return head, list(played), played.counts, played.failures, played.num_requested


def example(**changes):
    """A group of two rollouts with one step each."""
    step = {
        "index": 0,
        "prev_obs": "2+2=",
        "action": "4",
        "next_obs": None,
        "reward": 1.0,
        "truncated": False,
        "terminated": True,
    }
    step |= {"info": {"finish_reason": "stop"}, "trace": TokenTrace([5, 6], [7, 2], [-0.5, -0.25], "stop"), "ts_ns": 9} | changes
    meta = {"request_meta": {"group_id": "g1"}, "policy_version": 3}
    rollouts = [Rollout(f"r{i}", [Step(**step)], dict(meta)) for i in range(2)]
    return Group("run", 7, 3, played=PlayedRollouts(rollouts, RolloutCounts(num_episodes=2), []))


@settings(max_examples=settings.default.max_examples // 2)
@given(groups())
def test_groups_come_back_equal(group):
    again = decode_group(encode_group(group))
    assert facts(again) == facts(group)
    for step in (step for rollout in again.played for step in rollout.steps):
        trace = step.trace
        assert {type(token) for token in trace.prompt_token_ids + trace.completion_token_ids} <= {int}
        assert {type(logp) for logp in trace.completion_logprobs or []} <= {float}


def test_log_probabilities_of_a_model_here_take_four_bytes_and_others_eight():
    exact, parsed = example(trace=TokenTrace([1], [2], [-0.5])), example(trace=TokenTrace([1], [2], [-0.1]))
    assert len(encode_group(parsed)) - len(encode_group(exact)) == 2 * 4
    assert decode_group(encode_group(parsed)).played[0].steps[0].trace.completion_logprobs == [-0.1]


def test_numbers_of_numpy_and_halves_of_surrogates_are_sent_in_the_next_best_form():
    group = example(action="a\ud800b", info={"score": np.float32(0.5), "path": np.arange(3), "pair": (1, 2)})
    step = decode_group(encode_group(group)).played[0].steps[0]
    assert (step.action, step.info) == ("a?b", {"score": 0.5, "path": [0, 1, 2], "pair": [1, 2]})


def test_the_policy_versions_of_a_group_are_the_oldest_and_the_newest():
    group = example(info={"policy_version": 5})
    assert group.policy_versions == (3, 5)
    assert Group("run", 0, 0).policy_versions is None


def test_a_group_of_a_lease_has_its_facts():
    group = Group.of_lease(Lease(Work(9, 4, 1), "a", "run", "t"), example().played, 0.5)
    assert (group.run, group.number, group.version, group.attempt, group.actor, group.generation_s) == ("run", 9, 4, 1, "a", 0.5)
    assert group.played.counts.num_episodes == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": math.nan}, "reward of step 0 is nan"),
        ({"reward": 1e308}, r"reward of step 0 is 1e\+308; .*float32"),
        ({"reward": -1e308}, r"reward of step 0 is -1e\+308"),
        ({"trace": TokenTrace([1], [2], [5.0])}, "step 0 of rollout r0 .*log-probability 5; "),
        ({"trace": TokenTrace([], [])}, "no tokens"),
        ({"info": {"policy_version": -1}}, r"policy_version -1; .*from 0"),
        ({"info": {"policy_version": 2**62}}, "policy_version 4611686018427387904"),
        ({"trace": None}, "Missing rollout-time token trace"),
        ({"trace": TokenTrace([1], [2], [math.inf])}, "step 0 of rollout r0 .*log-probability inf; "),
        ({"trace": TokenTrace([1], [-2])}, "has the token id -2"),
        ({"trace": TokenTrace([2**31], [2])}, "token id 2147483648|2147483648"),
        ({"info": {"policy_version": "new"}}, "has policy_version 'new'"),
        ({"info": {"x": 2**70}}, "cannot be sent"),
        ({"action": 5}, "step 0 is of type int"),
    ],
)
def test_what_cannot_be_trained_on_is_not_sent_or_not_read(changes, message):
    with pytest.raises(EntryError, match=message):
        decode_group(encode_group(example(**changes)))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"request_meta": [1]}, "request_meta of a rollout is a list"),
        ({"request_meta": {"group_id": ["a"]}}, "group_id of a rollout is a list"),
        ({"engine": 5}, "engine of a rollout is a int"),
        ({"engine": {"return_spec": 7}}, "cannot be trained on"),
        ({"policy_version": 1.5}, "has policy_version 1.5"),
    ],
)
def test_metadata_that_the_trainer_computes_with_has_the_right_type(meta, message):
    group = example()
    group.played[0].meta.clear()
    group.played[0].meta.update(meta)
    with pytest.raises(EntryError, match=message):
        encode_group(group)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": -(2**62)}, "the group has policy_version -4611686018427387904"),
        ({"version": 10_006}, "policy_version 10006; .*0 to 10005"),
        ({"attempt": -1}, r"attempt \(-1\) must be >= 0"),
        ({"played": PlayedRollouts([], RolloutCounts(num_episodes=-5), [])}, r"num_episodes \(-5\) must be >= 0"),
        ({"played": PlayedRollouts([], RolloutCounts(), [], num_requested=-1)}, r"num_requested \(-1\) must be >= 0"),
    ],
)
def test_counts_and_versions_are_possible_ones(changes, message):
    with pytest.raises(EntryError, match=message):
        decode_group(as_sent(replace(example(), **changes)), check=SampleCheck(version=5))


@pytest.mark.parametrize("token", [300, 5_000, 2**31 - 1])
def test_ids_are_in_the_vocabulary_of_the_trainer(token):
    check = SampleCheck(vocab_size=300)
    for trace in (TokenTrace([1, token], [2], [-1.0]), TokenTrace([1], [2, token], [-1.0, -1.0])):
        with pytest.raises(EntryError, match=f"token id {token}, .*vocabulary has 300"):
            decode_group(encode_group(example(trace=trace)), check=check)
    decode_group(encode_group(example(trace=TokenTrace([299], [299], [1e-4]))), check=check)


def test_an_entry_may_have_the_answers_to_several_prompts():
    two = example()
    two.played[1].meta["request_meta"] = {"group_id": "g2"}
    assert [rollout.meta for rollout in decode_group(encode_group(two)).played] == [rollout.meta for rollout in two.played]


def test_the_rollouts_of_a_group_are_distinct():
    same = example()
    same.played[1].id = "r0"
    with pytest.raises(EntryError, match="the same id"):
        encode_group(same)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (EntryLimits(max_bytes=100), "100"),
        (EntryLimits(max_rollouts=1), "2 rollouts"),
        (EntryLimits(max_groups=1), r"2 groups \(group_id\); .*1 at most"),
    ],
)
def test_limits_are_those_of_the_reader(limits, message):
    two = example()
    two.played[1].meta["request_meta"] = {"group_id": "g2"}
    with pytest.raises(EntryError, match=message):
        decode_group(encode_group(two), limits)


def test_limits_must_be_positive():
    with pytest.raises(ConfigError, match="max_bytes"):
        EntryLimits(max_bytes=0)


def test_another_kind_version_or_program_is_named():
    payload = encode_group(example())
    for changed, message in [
        (b"JSON" + payload[4:], "no entry of ludic"),
        (payload[:4] + b"\x09" + payload[5:], "version 9, this ludic reads 4"),
        (payload[:5] + bytes([SAMPLES]) + payload[6:], "of kind 2, and 1 is expected"),
        (payload[:10], "less than its header"),
        (payload[:-1], "its checksum differs"),
    ]:
        with pytest.raises(EntryError, match=message):
            decode_group(changed)


def mutations(payload, rng):
    """A payload with bits flipped, bytes overwritten, cut out, repeated or appended."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1) if data else 0
        change = rng.randrange(5)
        if change == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            data[at : at + 4] = rng.randbytes(4)
        elif change == 2:
            del data[at : at + rng.randint(1, 40)]
        elif change == 3:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        else:
            data += rng.randbytes(rng.randint(1, 40))
    return bytes(data)


def test_no_damaged_entry_is_read():
    """3,000 entries damaged at random: each is refused, by the checksum if by nothing before."""
    rng, payload = random.Random(0), encode_group(example())
    for _ in range(3_000):
        damaged = mutations(payload, rng)
        if damaged != payload:
            with pytest.raises(EntryError):
                decode_group(damaged)


def test_an_entry_with_a_checksum_of_its_own_is_refused_or_can_be_trained_on():
    """Bodies damaged at random behind a right checksum, as a hostile producer sends them: nothing
    but EntryError is raised, and what is read is sound enough to be sent again."""
    rng, body = random.Random(1), encode_group(example())[entries._HEADER.size :]
    read = 0
    for _ in range(3_000):
        damaged = mutations(body, rng)
        payload = entries._HEADER.pack(b"LUDQ", 1, GROUP, entries.xxhash.xxh3_128_digest(damaged)) + damaged
        try:
            group = decode_group(payload)
        except EntryError:
            continue
        assert decode_group(encode_group(group)).played == group.played
        read += 1
    assert 0 < read < 1_000


def test_unknown_fields_are_refused():
    content = msgspec.to_builtins(_DECODER.decode(encode_group(example())[entries._HEADER.size :]), builtin_types=(bytes,))

    payload = entries._HEADER.pack(b"LUDQ", 1, GROUP, entries.xxhash.xxh3_128_digest(b"")) + b""
    with pytest.raises(EntryError, match="another structure"):
        decode_group(payload)
    body = msgspec.msgpack.encode([*content, "more"])
    with pytest.raises(EntryError, match="another structure"):
        decode_group(entries._HEADER.pack(b"LUDQ", 1, GROUP, entries.xxhash.xxh3_128_digest(body)) + body)


def test_deep_nesting_is_refused_and_does_not_crash():
    body = b"\x91" * 100_000
    with pytest.raises(EntryError):
        decode_group(entries._HEADER.pack(b"LUDQ", 1, GROUP, entries.xxhash.xxh3_128_digest(body)) + body)


def test_an_entry_that_is_too_large_is_not_sent():
    with pytest.raises(EntryError, match="play smaller groups"):
        seal(GROUP, _DECODER.decode(encode_group(example())[entries._HEADER.size :]), EntryLimits(max_bytes=64))


def long_episode(num_steps=50):
    ids = np.arange(10 * num_steps, dtype=np.int32)
    traces = [TokenTrace.from_arrays(ids[: 10 * at + 5], ids[10 * at + 5 : 10 * at + 10]) for at in range(num_steps)]
    return [Step(at, "", "", None, 0.0, False, at == num_steps - 1, {}, trace) for at, trace in enumerate(traces)]


def test_an_episode_is_sent_and_kept_in_the_bytes_of_its_distinct_tokens():
    steps = long_episode()
    entry = encode_group(Group("run", 0, 0, played=as_played([Rollout("r", steps)])))
    [read] = decode_group(entry).played
    columns = [stored(step.trace, "prompt_token_ids") for step in read.steps]
    assert len({id(column.base.memory) for column in columns[1:]}) <= 4
    assert read.steps == steps
    assert len(entry) < 2 * 4 * 500 + 50 * 40  # 49,750 bytes if each prompt were sent whole


def test_an_entry_is_as_small_in_memory_with_candidates_and_reads_so_many_tokens():
    steps = long_episode(4)
    for step in steps:
        object.__setattr__(step.trace, "candidates", [[]] * 5)
    group = Group("run", 0, 0, played=as_played([Rollout("r", steps)]))
    [read] = decode_group(encode_group(group)).played
    assert all(type(stored(step.trace, "prompt_token_ids")) is Column for step in read.steps)
    assert read.steps == steps
    limits = EntryLimits(max_bytes=len(encode_group(group)))
    assert encode_group(group, limits)
    traces = [TokenTrace.from_arrays(np.arange(limits.max_bytes // 4), [5], [-1.0])] * 20
    many = [replace(steps[0], index=at, trace=trace) for at, trace in enumerate(traces)]
    with pytest.raises(EntryError, match=r"read \d+ tokens, the limit is \d+"):
        encode_group(Group("run", 0, 0, played=as_played([Rollout("r", many)])), limits)


@pytest.mark.parametrize(("step", "shared"), [(0, 1), (1, 9), (1, 11), (1, -1)])
def test_a_prompt_shares_all_tokens_of_the_step_before(step, shared):
    entry = encode_group(Group("run", 0, 0, played=as_played([Rollout("r", long_episode(2))])))
    content = _DECODER.decode(memoryview(entry)[entries._HEADER.size :])
    content.rollouts[0].steps[step].trace.shared = shared
    with pytest.raises(EntryError, match=rf"shares {shared} tokens .*, which has"):
        decode_group(seal(GROUP, content, EntryLimits()))
