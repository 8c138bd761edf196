"""OpenEnv's own client and server over the network. Runs only where openenv is installed, which
conflicts with our pinned pillow and that of the other tests."""

import pytest

pytest.importorskip("openenv", reason="pip install 'ludic-rl[openenv]' in a separate environment")

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv_countdown import Left, Say, countdown_url

from ludic.envs.adapters import OpenEnvEnv
from ludic.errors import RolloutError


async def test_a_server_error_is_raised_and_an_action_of_another_type_is_invalid():
    env = OpenEnvEnv(countdown_url(), make_action=lambda text: {"message": text} if text != "odd" else {"number": 1})
    assert await env.env_reset(seed=0) == ("say 2", {})
    outcome = await env.env_step("odd")
    assert (outcome.info, outcome.reward, outcome.terminated) == ({"invalid_action": True, "raw_action": "odd"}, -1.0, False)
    assert (await env.env_step("2")).obs == "say 1"
    with pytest.raises(RolloutError, match="deep inside"):
        await env.env_step("break")
    await env.close()


async def test_concurrent_sessions_are_independent():
    envs = [OpenEnvEnv(countdown_url()) for _ in range(3)]
    assert [(await env.env_reset(seed=seed))[0] for seed, env in enumerate(envs)] == ["say 2", "say 3", "say 4"]
    assert [(await env.env_step("3")).reward for env in envs] == [0.0, 1.0, 0.0]
    for env in envs:
        await env.close()


async def test_a_typed_client_receives_its_own_types():
    class Client(EnvClient[Say, Left, dict]):
        def _step_payload(self, action):
            return action.model_dump()

        def _parse_result(self, payload):
            observation = Left(**payload["observation"], done=payload["done"], reward=payload["reward"])
            return StepResult(observation=observation, reward=payload["reward"], done=payload["done"])

        def _parse_state(self, payload):
            return payload

    env = OpenEnvEnv(Client(base_url=countdown_url(limit=1)), make_action=lambda text: Say(message=text))
    assert (await env.env_reset(seed=1))[0] == "say 3"
    outcome = await env.env_step("3")
    assert (outcome.obs, outcome.reward, outcome.terminated, outcome.truncated) == ("say 2", 1.0, False, True)
    await env.close()
    await env.close()
