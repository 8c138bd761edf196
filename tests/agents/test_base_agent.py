"""An agent's one call: what is sent, what is kept, what comes back."""

import asyncio

import pytest
from playing import FOR_RL, ScriptedClient, play, verbatim

import ludic.agent
import ludic.agents
from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.types import TokenTrace


def agent(client, **settings):
    made = Agent(client=client, model="m", ctx=FullDialog(), **{"parser": verbatim, **settings})
    made.reset(system_prompt="S")
    made.on_env_reset("O", {})
    return made


def test_an_answer_comes_with_its_info_and_its_tokens():
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
    assert acting.last_info["prompt_token_ids"] == [1, 2]  # what the client said stays as it was
    assert "token_ids" in acting.last_info["raw_response"]["choices"][0]
    assert acting._ctx.messages[-1] == {"role": "assistant", "content": "hi"}


def test_an_answer_cut_at_the_limit_is_not_parsed_but_remembered():
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


def test_a_call_that_takes_too_long_is_a_timeout():
    async def forever():
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        play(agent(ScriptedClient("a", delay=forever)).act(timeout_s=0.02))


def test_weights_go_through_to_clients_that_take_them():
    class Taking(ScriptedClient):
        def sync_weights(self, params, *, timeout_s=600.0, version=None):
            return f"{sorted(params)} {timeout_s} {version}"

    assert agent(Taking("a")).push_policy_update({"w": 1}, timeout_s=3.0, version=2) == "['w'] 3.0 2"
    with pytest.raises(RuntimeError, match="no sync_weights"):
        agent(ScriptedClient("a")).push_policy_update({})


def test_both_packages_offer_the_agent():
    assert ludic.agent.Agent is ludic.agents.Agent is Agent
