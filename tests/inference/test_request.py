"""Requests to chat servers."""

import asyncio
import json

import pytest

import ludic.inference
from ludic.errors import ConfigError
from ludic.inference import (
    BackendExtensions,
    ChatClient,
    ChatCompletionRequest,
    InferenceSpec,
    ReturnSpec,
    SamplingConfig,
    SamplingParams,
    ToolRequest,
    VLLMExtensions,
)
from ludic.types import ChatResponse, TokenTrace


def test_sampling_parameters_become_openai_arguments_with_plain_numbers():
    kwargs = SamplingParams(temperature=1, max_tokens=8.0, top_p=1, frequency_penalty=0, presence_penalty=0).to_openai_kwargs()
    assert kwargs == {"temperature": 1.0, "max_tokens": 8, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert [type(value) for value in kwargs.values()] == [float, int, float, float, float]
    assert SamplingParams(stop=["a"]).to_openai_kwargs()["stop"] == ["a"]
    assert SamplingParams(stop="a").to_openai_kwargs()["stop"] == "a"
    for nothing in (None, "", []):
        assert "stop" not in SamplingParams(stop=nothing).to_openai_kwargs()
    assert SamplingConfig is SamplingParams


def test_fields_that_openai_has_not_are_sent_if_they_change_something():
    assert SamplingParams().server_fields() == {}
    shaped = SamplingParams(top_k=5, min_p=0.1, repetition_penalty=1.2)
    assert shaped.server_fields() == {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}
    assert (shaped.is_cut, SamplingParams(top_p=0.9).is_cut, SamplingParams(temperature=0.5).is_cut) == (True, True, False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": -1}, r"top_k \(-1\) must be at least 0"),
        ({"min_p": 1.5}, r"min_p \(1.5\) must be at least 0 and at most 1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty \(0.0\) must be above 0"),
        ({"top_k": -2}, r"top_k \(-2\) must be at least 0"),
        ({"presence_penalty": 2.5}, r"presence_penalty \(2.5\) must be at least -2 and at most 2"),
        ({"stop": 5}, r"stop \(5\) .*list of texts"),
        ({"stop": [5]}, r"stop \(\[5\]\) .*list of texts"),
        ({"stop": ["a", ""]}, r"stop \(\['a', ''\]\)"),
    ],
)
def test_values_outside_their_range_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**values)


def test_return_specs_have_a_preset_for_each_use():
    assert ReturnSpec() == ReturnSpec(return_token_ids=False, return_chosen_logprobs=False, top_logprobs_k=1)
    assert ReturnSpec.for_eval() == ReturnSpec(return_token_ids=True)
    assert ReturnSpec.for_eval(return_token_ids=False) == ReturnSpec()
    assert ReturnSpec.for_rl(top_logprobs_k=3) == ReturnSpec(True, True, 3)
    for k in (0, -1):
        with pytest.raises(ValueError, match=rf"top_logprobs_k \({k}\) must be at least 1"):
            ReturnSpec(top_logprobs_k=k)


def test_a_response_has_the_parts_of_the_trace_that_were_requested():
    trace = TokenTrace([5, 6], [7, 2], [-0.5, -0.1], "stop")
    assert ReturnSpec.for_rl().make_response("a", trace) == ChatResponse("a", [7, 2], [-0.5, -0.1], "stop", [5, 6])
    assert ReturnSpec.for_eval().make_response("a", trace) == ChatResponse("a", [7, 2], None, "stop", [5, 6])
    assert ReturnSpec().make_response("a", trace) == ChatResponse("a", None, None, "stop", None)


def test_a_request_is_json_serialisable():
    request = ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": "2+2="}],
        seed=7,
        tools=ToolRequest([{"type": "function"}]),
        extensions=VLLMExtensions(max_think=5),
    )
    data = json.loads(json.dumps(request.to_dict()))
    assert data["sampling"]["temperature"] == 0.7
    assert data["tools"] == {"tools": [{"type": "function"}], "tool_choice": "auto", "keep_malformed": False}
    assert data["extensions"] == {"kind": "vllm", "max_think": 5, "repetition_penalty": 1.0, "extra_body_overrides": {}}
    assert BackendExtensions("other").to_dict() == {"kind": "other"}


def test_specs_are_immutable_and_share_no_state():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 1.0
    assert InferenceSpec() == InferenceSpec(SamplingParams(), ReturnSpec(), None)
    assert VLLMExtensions().extra_body_overrides is not VLLMExtensions().extra_body_overrides


def test_a_client_can_subclass_the_protocol_and_omit_optional_members():
    class Mine(ChatClient):
        async def complete(self, request):
            return ChatResponse("a"), {}

    response, _ = asyncio.run(Mine().complete(ChatCompletionRequest("m", [])))
    assert response.text == "a"
    with pytest.raises(NotImplementedError, match="Mine does not take new weights"):
        Mine().sync_weights({})


def test_the_error_of_an_unknown_name_names_it():
    assert "LocalChatClient" in ludic.inference.__all__
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = ludic.inference.absent
