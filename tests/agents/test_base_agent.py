"""One model call of an agent: what is sent, what is stored, what is returned."""

import asyncio
import copy

import pytest
from playing import FOR_RL, ScriptedClient, play, verbatim

from ludic.agents import Agent
from ludic.agents.base_agent import drop_traces
from ludic.context import FullDialog
from ludic.inference import InferenceSpec, ReturnSpec, SamplingParams, VLLMExtensions
from ludic.types import ChatResponse, TokenTrace


def agent(client, **settings):
    made = Agent(client=client, model="m", ctx=FullDialog(), **{"parser": verbatim, **settings})
    made.reset(system_prompt="S")
    made.on_env_reset("O", {})
    return made


def test_an_answer_is_returned_with_its_info_and_tokens():
    client = ScriptedClient("hi")
    acting = agent(client)
    parsed, raw, info, trace = play(acting.act(inference=FOR_RL, sampling_seed=4))
    assert (parsed.action, raw) == ("hi", "hi")
    sent = client.requests[0]
    assert (sent.model, sent.seed, sent.sampling, sent.return_, sent.tools) == ("m", 4, FOR_RL.sampling, FOR_RL.return_, None)
    assert sent.messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "O"}]
    assert trace == TokenTrace([1, 2], [104, 105], [-0.5, -0.5], "stop")
    assert info == {
        "raw_response": {"choices": [{"index": 0}]},
        "chat_prompt_messages": sent.messages,
        "chat_completion": {"role": "assistant", "content": "hi"},
        "completion": "hi",
        "finish_reason": "stop",
    }
    assert acting.last_info["prompt_token_ids"] == [1, 2]  # the client's own info is not changed
    assert "token_ids" in acting.last_info["raw_response"]["choices"][0]
    assert acting._ctx.messages[-1] == {"role": "assistant", "content": "hi"}


def test_a_truncated_answer_is_not_parsed_but_stays_in_the_context():
    def refuse(text):
        raise AssertionError("the parser must not be called")

    acting = agent(ScriptedClient("hal", finish_reason="length"), parser=refuse, incomplete_completion_penalty=-0.3)
    parsed, raw, info, _ = play(acting.act())
    assert (parsed.action, parsed.reward, raw) == (None, -0.3, "hal")
    assert info["incomplete_completion"] is True
    assert acting._ctx.messages[-1]["content"] == "hal"
    lenient = agent(ScriptedClient("hal", finish_reason="length"), reject_incomplete_completions=False)
    parsed, _, info, _ = play(lenient.act())
    assert parsed.action == "hal"
    assert "incomplete_completion" not in info


def test_a_slow_model_call_times_out():
    async def forever():
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        play(agent(ScriptedClient("a", delay=forever)).act(timeout_s=0.02))


def test_weights_are_passed_to_clients_that_accept_them():
    class Taking(ScriptedClient):
        def sync_weights(self, params, *, timeout_s=600.0, version=None):
            return f"{sorted(params)} {timeout_s} {version}"

    assert agent(Taking("a")).push_policy_update({"w": 1}, timeout_s=3.0, version=2) == "['w'] 3.0 2"
    with pytest.raises(RuntimeError, match="no sync_weights"):
        agent(ScriptedClient("a")).push_policy_update({})


def test_request_settings_default_to_the_clients_and_extensions_are_passed_on():
    client = ScriptedClient("a")
    acting = agent(client)
    extensions = VLLMExtensions(max_think=5)
    play(acting.act())
    play(acting.act(inference=InferenceSpec(extensions=extensions)))
    plain, extended = client.requests
    assert (plain.sampling, plain.return_, plain.seed, plain.extensions) == (SamplingParams(), ReturnSpec(), None, None)
    assert extended.extensions is extensions


def test_the_messages_in_the_info_stay_those_that_were_sent():
    acting = agent(ScriptedClient("a", "b"))
    _, _, info, _ = play(acting.act())
    acting.on_after_step("next", {})
    play(acting.act())
    assert info["chat_prompt_messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "O"}]


def test_a_clients_info_is_cleaned_on_a_copy():
    later_message = {
        "prompt_token_ids": [1],
        "completion_token_ids": [2],
        "completion_logprobs": [-0.5],
        "policy_version": 3,
        "raw_response": {
            "id": "r",
            "prompt_token_ids": [1],
            "choices": [{"index": 0, "token_ids": [2], "logprobs": {"content": []}}, "odd"],
        },
    }
    before = copy.deepcopy(later_message)
    cleaned = {"policy_version": 3, "raw_response": {"id": "r", "choices": [{"index": 0}, "odd"]}}
    assert drop_traces(later_message) == cleaned
    assert later_message == before
    for odd in ({}, {"raw_response": None}, {"raw_response": "text"}, {"raw_response": {"choices": None}}):
        assert drop_traces(odd) == odd


def test_an_answer_without_ids_has_no_trace():
    class Silent:
        async def complete(self, request):
            return ChatResponse("a"), {}

    _, _, info, trace = play(agent(Silent()).act())
    assert trace is None
    assert "finish_reason" not in info
