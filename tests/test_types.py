"""Traces, steps, rollouts and samples with byte-tokenizer ids."""

import copy
import json
import logging
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st
from image_spans import span_lists

from ludic.errors import DataError, LudicError
from ludic.files.json_values import encode_lines, make_encodable
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.training.types import (
    ActorTokenLogps,
    EnvSpec,
    HasActorLogps,
    ProtocolSpec,
    RolloutRequest,
    SampleAttachments,
    SAWBatch,
    SAWItem,
    has_actor_logps,
)
from ludic.types import ChatResponse, ImageSpan, Rollout, Snapshot, Step, StepOutcome, TokenTrace, group_of, read_spans

TOKENIZER = make_byte_tokenizer()
ids = st.lists(st.integers(0, 2**31 - 1))
logps = st.floats(max_value=0.0, allow_nan=False)


@st.composite
def traces(draw):
    completion = draw(ids)
    logprobs = draw(st.none() | st.lists(logps, min_size=len(completion), max_size=len(completion)))
    return TokenTrace(draw(ids), completion, logprobs, draw(st.none() | st.sampled_from(["stop", "length"])))


@given(traces())
def test_a_trace_survives_a_json_round_trip(trace):
    assert TokenTrace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


@pytest.mark.parametrize("wrong", [(1, 2), np.array([1, 2]), None, "12", [1, 2.0], [True], [None]])
@pytest.mark.parametrize("name", ["prompt_token_ids", "completion_token_ids"])
def test_token_ids_of_a_trace_are_lists_of_int(name, wrong):
    fields = {"prompt_token_ids": [1], "completion_token_ids": [2]} | {name: wrong}
    with pytest.raises(TypeError, match=f"{name} must be a list of int") as caught:
        TokenTrace(**fields)
    assert isinstance(caught.value, LudicError)


def test_the_error_shows_the_invalid_element():
    with pytest.raises(TypeError, match=r"got a list that holds 2\.0 \(float\)"):
        TokenTrace([1, 2.0], [3])
    with pytest.raises(TypeError, match=r"got a list that holds '-1' \(str\)"):
        TokenTrace([1], [3], ["-1"])


def test_a_trace_has_one_log_probability_per_completion_token():
    assert TokenTrace([1], [2, 3], [-1, np.float64(-0.5)]).completion_logprobs == [-1, -0.5]
    with pytest.raises(TypeError, match="must be a list of float"):
        TokenTrace([1], [2], (-0.5,))
    with pytest.raises(TypeError, match="must be a list of float"):
        TokenTrace([1], [2], [False])
    with pytest.raises(ValueError, match="has 1 values for 2 tokens"):
        TokenTrace([1], [2, 3], [-0.5])


def test_a_response_becomes_a_trace_only_with_both_id_lists_which_are_copied():
    prompt, completion = TOKENIZER.encode("2+2="), [*TOKENIZER.encode("4"), TOKENIZER.eos_token_id]
    assert prompt == [53, 46, 53, 64]  # byte + 3: "2" is 50, "+" 43, "=" 61
    assert completion == [55, 2]
    response = ChatResponse("4", completion, [-0.2, -0.1], "stop", prompt)
    trace = response.to_trace()
    assert trace == TokenTrace(prompt, completion, [-0.2, -0.1], "stop")
    completion.append(7)
    prompt.append(7)
    assert (trace.prompt_token_ids, trace.completion_token_ids) == ([53, 46, 53, 64], [55, 2])
    assert ChatResponse("4", completion_token_ids=[55]).to_trace() is None
    assert ChatResponse("4", prompt_token_ids=[53]).to_trace() is None


def test_a_response_shows_its_text_and_its_finish_reason():
    assert ChatResponse("4").to_info() == {"completion": "4"}
    info = {"completion": "old", "server": "here"}
    merged = ChatResponse("4", finish_reason="stop").merge_into_info(info)
    assert merged is info
    assert info == {"completion": "4", "finish_reason": "stop", "server": "here"}
    assert ChatResponse("4").merge_into_info() == {"completion": "4"}


def test_a_response_with_unequal_numbers_of_ids_and_log_probabilities_warns(caplog):
    with caplog.at_level(logging.WARNING):
        ChatResponse("4", [55, 2], [-0.2])
        ChatResponse("4", [55, 2], [-0.2, -0.1])
        ChatResponse("4", [55, 2])
    [record] = caplog.records
    assert "2 token ids and 1 log-probabilities" in record.getMessage()


def test_a_rollout_sums_its_steps():
    steps = [
        Step(0, "o", "a", "n", 1.0, False, False, ts_ns=2_000_000_000),
        Step(1, "n", "b", None, 0.5, False, True, ts_ns=3_500_000_000),
    ]
    rollout = Rollout(steps=steps)
    assert (rollout.total_reward, rollout.length) == (1.5, 2)
    assert (rollout.start_ns, rollout.end_ns) == (2_000_000_000, 3_500_000_000)
    assert (rollout.duration_ns, rollout.duration_s) == (1_500_000_000, 1.5)


def test_a_rollout_without_steps_has_no_times():
    rollout = Rollout()
    assert (rollout.total_reward, rollout.length) == (0, 0)
    assert rollout.start_ns is rollout.end_ns is rollout.duration_ns is rollout.duration_s is None


def test_rollouts_and_steps_share_no_mutable_defaults():
    first, second = Rollout(), Rollout()
    assert first.id != second.id
    assert first.steps is not second.steps
    assert StepOutcome("o", 0.0, False, False).info is not StepOutcome("o", 0.0, False, False).info
    item, other = SAWItem([1], [1], [1], 0.0), SAWItem([1], [1], [1], 0.0)
    assert item.meta is not other.meta
    assert item.attachments is not other.attachments
    assert SAWBatch([]).meta is not SAWBatch([]).meta


def test_steps_accept_positional_fields():
    step = Step(0, "o", "a", "n", 1.0, False, True)
    assert (step.index, step.prev_obs, step.action, step.next_obs) == (0, "o", "a", "n")
    assert (step.reward, step.truncated, step.terminated) == (1.0, False, True)
    assert step.ts_ns > 1.7e18  # nanoseconds since 1970, and the test runs in 2023 or later


def test_a_snapshot_is_json_serialisable():
    snapshot = Snapshot("tictactoe", "1", "e", "board", {"moves": [1, 5]}, created_ns=7)
    assert json.loads(snapshot.to_json()) == {
        "env_kind": "tictactoe",
        "version": "1",
        "episode_id": "e",
        "obs": "board",
        "world": {"moves": [1, 5]},
        "created_ns": 7,
    }


def test_actor_log_probabilities_are_a_list_of_float_or_a_float_array():
    assert ActorTokenLogps([-0.5, -1]).token_logps == [-0.5, -1]
    assert ActorTokenLogps(np.array([-0.5], dtype=np.float32)).token_logps.dtype == np.float32
    for wrong in [(-0.5,), ["-0.5"], [None], np.array([1, 2]), np.zeros((2, 2)), -0.5]:
        with pytest.raises(TypeError, match=r"must be a List\[float\]"):
            ActorTokenLogps(wrong)


def test_a_sample_knows_whether_it_has_actor_log_probabilities():
    bare = SAWItem([53, 55], [1, 1], [0, 1], 0.5)
    logged = SAWItem([53, 55], [1, 1], [0, 1], 0.5, attachments=SampleAttachments(ActorTokenLogps([-0.2])))
    assert not has_actor_logps(bare)
    assert bare.actor_logps is None
    assert has_actor_logps(logged)
    assert logged.actor_logps.token_logps == [-0.2]
    assert isinstance(logged, HasActorLogps)


def test_a_request_defaults_to_one_episode_with_unset_seeds():
    request = RolloutRequest(EnvSpec("qa"), ProtocolSpec("single"))
    assert (request.env_seed, request.sampling_seed, request.inference, request.num_episodes) == (None, None, None, 1)
    assert request.meta == request.env.kwargs == request.protocol.kwargs == {}


def test_the_group_id_comes_from_the_request_or_is_none():
    assert group_of({"request_meta": {"group_id": "g1"}, "group_id": "other"}) == "g1"
    assert [group_of(meta) for meta in ({}, {"request_meta": None}, {"request_meta": {}})] == [None, None, None]


@given(prompt=span_lists(["a" * 32, "b" * 32]), candidates=st.sampled_from([None, [[1, 2]]]))
def test_a_trace_with_images_survives_each_way_through_json(prompt, candidates):
    ids, spans = prompt
    trace = TokenTrace(ids, [7], [-0.5], "stop", candidates, spans)
    assert TokenTrace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace
    [line] = encode_lines([{"steps": [Step(0, "a", "b", None, 0.0, False, True, {}, trace)]}])
    assert TokenTrace.from_dict(json.loads(line)["steps"][0]["trace"]) == trace
    assert TokenTrace.from_dict(make_encodable(trace)) == trace
    assert TokenTrace.from_arrays(ids, [7], [-0.5], "stop", spans) == TokenTrace(ids, [7], [-0.5], "stop", None, spans)
    response = ChatResponse("b", [7], [-0.5], "stop", ids, candidates, spans)
    assert response.to_trace() == response.to_arrays().to_trace() == trace


def test_a_trace_without_images_is_the_json_that_it_was():
    trace = TokenTrace([1], [2], None, "stop", images=())
    keys = ["prompt_token_ids", "completion_token_ids", "completion_logprobs", "finish_reason", "candidates"]
    [line] = encode_lines([{"trace": trace}])
    for content in (trace.to_dict(), json.loads(line)["trace"], make_encodable(trace)):
        assert list(content) == keys
    assert trace.images == copy.deepcopy(trace).images == pickle.loads(pickle.dumps(trace)).images == ()
    assert trace == TokenTrace([1], [2], None, "stop")


@pytest.mark.parametrize(
    "spans",
    [
        [("a", 2, 2)],
        [("a", -1, 1)],
        [("a", 0, 0)],
        [("a", 0, 2), ("b", 1, 1)],
        [("a", 1, 1), ("b", 0, 1)],
        [("a", 0)],
        [("a", 0.0, 1)],
        [("a", True, 1)],
        [(7, 0, 1)],
        ["abc"],
        [None],
    ],
)
def test_spans_lie_in_the_prompt_one_after_the_other(spans):
    with pytest.raises(DataError, match=r"images has .* after \d of 3 tokens"):
        TokenTrace([1, 2, 3], [4], images=tuple(spans))
    with pytest.raises(DataError, match="images has"):
        TokenTrace.from_dict({"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4], "images": spans})


def test_spans_are_read_from_lists_of_json():
    assert read_spans([["a", 0, 1], ["b", 1, 2]], 3) == (ImageSpan("a", 0, 1), ImageSpan("b", 1, 2))
