"""Episodes and dialogues as samples: the server's tokens where there are some, the template's
otherwise."""

import asyncio

import pytest
from byte_client import ByteClient, ids
from chat_tokenizers import CHATML, chat_tokenizer
from playing import Counting, ScriptedClient

from ludic.errors import ConfigError, DataError
from ludic.rollouts.training import agent_rollout_to_sample, generate_rollout_batch, trajectory_to_sample
from ludic.rollouts.training.agent_integration import AgentEndpoint, generate_agent_samples
from ludic.rollouts.training.types import SampleStatus
from ludic.types import ChatResponse, Rollout, Step, TokenTrace


def two_turns(prompt):
    return Counting(goal=2)


def test_an_episode_is_one_sample_of_the_servers_tokens():
    client = ByteClient("yes", "no")
    sample = asyncio.run(agent_rollout_to_sample("p", two_turns, AgentEndpoint(client, "m"), None, metadata={"id": 7}))
    assert sample.tokens == ids("start None\nyes\nstep 1\nno\n")
    said = [token for token, m in zip(sample.tokens, sample.loss_mask, strict=True) if m]
    assert said == ids("yes\nno\n")
    logps = [logp for logp, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m]
    assert logps == [logp for _, _, sent in client.sent for logp in sent]
    assert (sample.prompt, sample.reward, sample.status) == ("p", 1.0, SampleStatus.COMPLETED)
    assert sample.metadata["id"] == 7
    assert Counting.made[-1].closed


def test_episodes_come_in_the_order_of_the_prompts():
    endpoint = AgentEndpoint(ByteClient("yes"), "m")
    samples = asyncio.run(
        generate_rollout_batch(["p", "q"], two_turns, endpoint, None, max_turns=1, metadata_list=[{"i": 0}, {"i": 1}])
    )
    assert [(sample.prompt, sample.metadata["i"], sample.status) for sample in samples] == [
        ("p", 0, SampleStatus.TRUNCATED),
        ("q", 1, SampleStatus.TRUNCATED),
    ]
    assert generate_rollout_batch is generate_agent_samples
    with pytest.raises(ConfigError, match="1 entries for 2 prompts"):
        asyncio.run(generate_rollout_batch(["p", "q"], two_turns, endpoint, None, metadata_list=[{}]))


def test_an_episode_that_fails_ends_the_others():
    class Failing(Counting):
        def env_step(self, action):
            raise OSError("broken")

    client = ScriptedClient("a", delay=lambda: asyncio.sleep(0))
    with pytest.raises(OSError, match="broken"):
        asyncio.run(generate_agent_samples(["p", "q"], lambda prompt: Failing(), AgentEndpoint(client, "m"), None))
    assert all(env.closed for env in Counting.made[-2:])


class TextClient:
    """A server that returns text alone."""

    async def complete(self, request):
        return ChatResponse("yes", finish_reason="stop"), {}


def test_text_is_tokenized_only_where_there_are_no_tokens(caplog):
    tokenizer, endpoint = chat_tokenizer(CHATML), AgentEndpoint(TextClient(), "m")
    sample = asyncio.run(agent_rollout_to_sample("p", two_turns, endpoint, tokenizer))
    said = [token for token, m in zip(sample.tokens, sample.loss_mask, strict=True) if m]
    assert tokenizer.decode(said) == "yes<|im_end|>yes<|im_end|>"
    assert sample.reward == 1.0
    assert "its text is tokenized" in caplog.text
    with pytest.raises(DataError, match="for_rl"):
        asyncio.run(agent_rollout_to_sample("p", two_turns, endpoint, None))


class Trajectory:
    def __init__(self, messages):
        self.messages = messages


def test_a_dialogue_is_a_sample():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = chat_tokenizer(CHATML)
    sample = trajectory_to_sample(Trajectory(talk), tokenizer, {"id": 1})
    assert sample == trajectory_to_sample(talk, tokenizer, {"id": 1})
    assert (sample.prompt, sample.response, sample.metadata) == (talk[:1], "b", {"id": 1})
    assert tokenizer.decode([t for t, m in zip(sample.tokens, sample.loss_mask, strict=True) if m]) == "b<|im_end|>"
    rollout = Rollout(id="r", steps=[Step(0, "a", "b", None, 1.0, False, True, trace=TokenTrace([1], [2]))])
    assert trajectory_to_sample(rollout, tokenizer, {"id": 1}).metadata == {"rollout_id": "r", "id": 1}


@pytest.mark.parametrize(
    ("trajectory", "remedy"),
    [
        ("hi", "a str is no trajectory"),
        ([], "begins with nothing"),
        ([{"role": "assistant", "content": "b"}], "begins with assistant.* must begin with a user message"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "no assistant message"),
    ],
)
def test_what_is_no_dialogue_is_an_error(trajectory, remedy):
    with pytest.raises(DataError, match=remedy):
        trajectory_to_sample(trajectory, chat_tokenizer(CHATML))
