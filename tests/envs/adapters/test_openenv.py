"""The adapter of OpenEnv clients: what is sent, how responses are used, and what is an error."""

import asyncio

import pytest
from foreign_envs import CountdownClient, Result

from ludic.envs.adapters import OpenEnvEnv
from ludic.envs.adapters.openenv import says_truncated, shown_observation
from ludic.errors import ConfigError, RolloutError


async def test_every_reset_sends_the_seed_and_settings_and_actions_are_built_by_the_parser():
    client = CountdownClient()
    env = OpenEnvEnv(client, reset_settings={"level": 3})
    await env.env_reset()
    await env.env_reset(seed=1)
    outcome = await env.env_step("3")
    assert client.calls == [("reset", {"level": 3}), ("reset", {"level": 3, "seed": 1}), ("step", {"message": "3"})]
    assert (outcome.obs, outcome.reward, outcome.terminated) == ("say 2", 1.0, False)


async def test_text_that_is_not_an_action_is_never_sent():
    client = CountdownClient()
    env = OpenEnvEnv(client, make_action=lambda text: {"message": str(int(text))}, invalid_action_reward=-0.5)
    await env.env_reset(seed=0)
    outcome = await env.env_step("two")
    assert (outcome.reward, outcome.terminated, outcome.info) == (-0.5, False, {"invalid_action": True, "raw_action": "two"})
    assert outcome.obs.endswith("\nsay 2")
    assert [name for name, _ in client.calls] == ["reset"]


async def test_an_action_that_the_server_rejects_is_invalid_and_other_errors_are_raised():
    env = OpenEnvEnv(CountdownClient())
    await env.env_reset(seed=0)
    assert (await env.env_step("２")).info["invalid_action"] is True

    class Failing(CountdownClient):
        async def step(self, action):
            raise RuntimeError("Server error: it broke (code: EXECUTION_ERROR)")

    env = OpenEnvEnv(Failing())
    await env.env_reset(seed=0)
    with pytest.raises(RolloutError, match="Failing: Server error: it broke"):
        await env.env_step("2")


async def test_a_silent_server_is_a_timeout():
    class Silent(CountdownClient):
        async def reset(self, **settings):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await OpenEnvEnv(Silent(), timeout_s=0.01).env_reset()
    with pytest.raises(ConfigError, match=r"timeout_s \(0\) must be above 0"):
        OpenEnvEnv(Silent(), timeout_s=0)


async def test_the_session_is_closed_once():
    client = CountdownClient()
    env = OpenEnvEnv(client)
    await env.close()
    await env.close()
    assert client.calls == [("close", None)]


class Fields:
    """An observation in the form of a pydantic model."""

    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self):
        return self.fields


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("as it is", "as it is"),
        ({"text": "as it is", "metadata": {"a": 1}}, "as it is"),
        ({"board": [1, 2], "turn": "x"}, '{"board": [1, 2], "turn": "x"}'),
        (Fields(echoed="é", done=False, reward=None, metadata={}), "é"),
        (Fields(n=3), '{"n": 3}'),
        ([1], "[1]"),
    ],
)
def test_an_observation_is_shown_as_its_only_text_or_as_its_fields(observation, text):
    assert shown_observation(observation) == text


def test_truncation_is_read_from_the_observation_or_its_metadata():
    assert says_truncated(Result({"truncated": True}))
    assert says_truncated(Result({"metadata": {"truncated": True}}))
    assert says_truncated(Result(Fields(metadata={"truncated": True})))
    assert says_truncated(Result("text", metadata={"truncated": True}))
    assert not says_truncated(Result("text"))
    assert not says_truncated(Result({"truncated": "no"}, metadata={"truncated": False}))
