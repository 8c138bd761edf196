"""Steps, rollouts and traces."""

import json

import pytest

from ludic.errors import DataTypeError, LudicError, MissingExtraError
from ludic.types import ChatResponse, Rollout, Snapshot, Step, TokenTrace


def test_a_trace_holds_lists_of_ints_and_one_log_probability_a_token():
    for wrong in ((1, 2), [1.0], [True], "ab", None):
        with pytest.raises(TypeError, match="must be a list of int"):
            TokenTrace(wrong, [1])
        with pytest.raises(TypeError, match="must be a list of int"):
            TokenTrace([1], wrong)
    with pytest.raises(TypeError, match="must be a list of float"):
        TokenTrace([1], [2], ["x"])
    with pytest.raises(ValueError, match="2 values for 1 completion tokens"):
        TokenTrace([1], [2], [0.0, -1.0])
    assert TokenTrace([1], [2], [-1]).completion_logprobs == [-1]


def test_a_trace_survives_json():
    for trace in (TokenTrace([1], [2, 3], [-0.5, -1.0], "stop"), TokenTrace([1], [2])):
        assert TokenTrace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


def test_a_response_with_uneven_log_probabilities_warns(caplog):
    ChatResponse("a", [1, 2], [0.0])
    assert "2 token ids and 1 log-probabilities" in caplog.text


def test_a_response_becomes_info_and_trace():
    response = ChatResponse("a", [1], [-0.5], "stop", [7])
    info = {"x": 1}
    assert response.merge_into_info(info) is info
    assert info == {"x": 1, "completion": "a", "finish_reason": "stop"}
    assert ChatResponse("a").to_info() == {"completion": "a"}
    assert response.to_trace() == TokenTrace([7], [1], [-0.5], "stop")
    assert ChatResponse("a", [1]).to_trace() is None
    assert ChatResponse("a", prompt_token_ids=[1]).to_trace() is None


def test_a_rollout_sums_its_steps():
    first, second = Step(0, "o", "a", "n", 1.0, False, False, ts_ns=5), Step(1, "n", "b", None, 0.5, False, True, ts_ns=9)
    rollout = Rollout(steps=[first, second])
    assert (rollout.total_reward, rollout.length, rollout.duration_ns, rollout.duration_s) == (1.5, 2, 4, 4e-9)
    empty = Rollout()
    assert (empty.total_reward, empty.start_ns, empty.duration_s) == (0, None, None)
    assert empty.id != Rollout().id


def test_a_snapshot_is_json():
    assert json.loads(Snapshot("k", "1", "e", "o", {"a": 1}, created_ns=3).to_json())["world"] == {"a": 1}


def test_errors_are_standard_types_too_and_name_the_extra():
    assert issubclass(DataTypeError, TypeError)
    assert issubclass(DataTypeError, LudicError)
    assert "pip install 'ludic[wandb]'" in str(MissingExtraError.for_extra("wandb", "wandb"))
