"""Requests: groups, queues, sequences, and sources that resume."""

import queue
import random

import pytest
from hypothesis import given, strategies as st
from playing import Counting, ScriptedClient, play, protocol

from ludic.errors import ConfigError
from ludic.inference import InferenceSpec, SamplingParams
from ludic.training import (
    EnvSpec,
    GRPORequestStrategy,
    IdentityStrategy,
    ProtocolSpec,
    RequestsExhausted,
    RolloutBatchSource,
    RolloutEngine,
    RolloutRequest,
    make_dataset_queue_requests_fn,
    make_dataset_sequence_requests_fn,
    make_grpo,
)
from ludic.training.batching import make_requests_fn_from_queue

BASE = RolloutRequest(EnvSpec("e"), ProtocolSpec("p"), env_seed=7, sampling_seed=100, num_episodes=5, meta={"a": 1})


def test_the_members_of_a_group_share_a_problem_and_differ_in_their_seeds():
    group = GRPORequestStrategy(3).expand([BASE])
    assert [r.env_seed for r in group] == [7, 7, 7]
    assert [r.sampling_seed for r in group] == [100, 101, 102]
    assert [r.num_episodes for r in group] == [1, 1, 1]
    assert len({r.meta["group_id"] for r in group}) == 1
    assert group[0].meta["a"] == 1
    assert BASE.meta == {"a": 1}


def test_groups_have_unique_ids_and_seeds_that_the_random_state_reproduces():
    open_seeds = RolloutRequest(EnvSpec("e"), ProtocolSpec("p"))
    random.seed(3)
    first = GRPORequestStrategy(2).expand([open_seeds, open_seeds])
    random.seed(3)
    assert GRPORequestStrategy(2).expand([open_seeds, open_seeds]) == first
    assert len({r.meta["group_id"] for r in first}) == 2
    assert first[0].env_seed == first[1].env_seed != first[2].env_seed


def test_an_empty_group_is_refused():
    with pytest.raises(ValueError, match="group_size must be positive, got 0"):
        GRPORequestStrategy(0)
    assert IdentityStrategy().expand([BASE]) == [BASE]


def make_queue(count):
    q = queue.Queue()
    for row in range(count):
        q.put((row, f"s{row}"))
    return q


def test_a_queue_returns_its_requests_and_then_raises():
    fn = make_dataset_queue_requests_fn(make_queue(5), batch_size=2, env_kind="e", protocol_kind="p")
    assert [[r.env.kwargs["sample"] for r in fn()] for _ in range(3)] == [["s0", "s1"], ["s2", "s3"], ["s4"]]
    with pytest.raises(RequestsExhausted):
        fn()
    quiet = make_requests_fn_from_queue(queue.Queue(), batch_size=2, build_request=lambda row: BASE, on_empty="return_empty")
    assert quiet() == []
    with pytest.raises(ConfigError, match=r"batch_size \(0\) must be above 0"):
        make_requests_fn_from_queue(queue.Queue(), batch_size=0, build_request=lambda row: BASE)


def test_a_row_sets_every_part_of_its_request():
    fn = make_dataset_queue_requests_fn(
        make_queue(3),
        batch_size=3,
        env_kind="e",
        protocol_kind="p",
        env_kwargs_fn=lambda sample: {"text": sample},
        protocol_kwargs={"k": 1},
        request_meta_fn=lambda index, sample: {"row": index},
        env_seed_fn=lambda index, sample: index + 10,
        sampling_seed_fn=lambda index, sample: index + 20,
        group_size=2,
    )
    got = fn()[2]
    assert (got.env.kwargs, got.protocol.kwargs, got.env_seed, got.sampling_seed) == ({"text": "s1"}, {"k": 1}, 11, 21)
    assert got.meta["row"] == 1
    assert "group_id" in got.meta


def sequence(count, **settings):
    return make_dataset_sequence_requests_fn(list(range(count)), env_kind="e", protocol_kind="p", **settings)


def draw_batches(fn, batches):
    return [r.env.kwargs["sample"] for _ in range(batches) for r in fn()]


def test_a_sequence_repeats_in_order():
    assert draw_batches(sequence(3, batch_size=2), 3) == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="empty"):
        sequence(0, batch_size=1)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 12), st.integers(0, 99))
def test_a_shuffled_sequence_returns_every_sample_once_per_pass_and_resumes_anywhere(count, batch_size, before, seed):
    batches = before + 2 * count
    fn = sequence(count, batch_size=batch_size, shuffle=True, rng_seed=seed)
    whole = draw_batches(fn, batches)
    for start in range(0, len(whole) - count, count):
        assert sorted(whole[start : start + count]) == list(range(count))
    first = sequence(count, batch_size=batch_size, shuffle=True, rng_seed=seed)
    head = draw_batches(first, before)
    second = sequence(count, batch_size=batch_size, shuffle=True, rng_seed=seed)
    second.load_state_dict(first.state_dict())
    assert head + draw_batches(second, batches - before) == whole


def source(**settings):
    engine = RolloutEngine(
        env_registry={"e": lambda sample: Counting()}, protocol_registry={"p": lambda: protocol(ScriptedClient("a"))}
    )
    return RolloutBatchSource(orchestrator=engine, requests_fn=sequence(5, batch_size=2, group_size=4), **settings)


def test_a_source_takes_credit_from_an_assigner_or_an_algorithm():
    algorithm = make_grpo(group_size=4)
    batch = play(source(algorithm=algorithm).next_batch())
    assert [item.weight for item in batch.items] == [0.0] * 8  # every episode earns 1
    assert source(credit_assigner=algorithm.credit_assigner).credit_assigner is algorithm.credit_assigner
    with pytest.raises(ConfigError, match="credit_assigner or algorithm"):
        source()
    with pytest.raises(ConfigError, match="engine"):
        source(algorithm=algorithm, engine=RolloutEngine(env_registry={}, protocol_registry={}))


def test_greedy_groups_are_refused_and_single_greedy_answers_are_not():
    greedy = InferenceSpec(sampling=SamplingParams(temperature=0.0))
    kinds = {"batch_size": 1, "env_kind": "e", "protocol_kind": "p"}
    for make in (make_dataset_sequence_requests_fn, make_dataset_queue_requests_fn):
        samples = ["a"] if make is make_dataset_sequence_requests_fn else queue.Queue()
        make(samples, **kinds, group_size=1, inference=greedy)
        make(samples, **kinds, group_size=4)  # the default temperature is above 0
        with pytest.raises(ConfigError, match=r"group_size \(4\) at temperature 0 gives equal answers"):
            make(samples, **kinds, group_size=4, inference=greedy)


def test_a_source_awaits_requests_of_a_coroutine_function():
    async def requests():
        return [RolloutRequest(EnvSpec("e", {"sample": 1}), ProtocolSpec("p"))]

    made = source(algorithm=make_grpo(group_size=2))
    made.requests_fn = requests
    with pytest.raises(ValueError, match="missing group_id"):
        play(made.next_batch())


def test_a_source_resumes_with_the_next_requests():
    algorithm = make_grpo(group_size=4)
    first = source(algorithm=algorithm)
    play(first.next_batch())
    second = source(algorithm=algorithm)
    second.load_state_dict(first.state_dict())
    seeds = [[item.meta["engine"]["env_seed"] for item in play(s.next_batch()).items] for s in (first, second)]
    assert seeds[0] == seeds[1] == [2] * 4 + [3] * 4
