"""One agent in one environment, step by step."""

import asyncio

import pytest
from playing import Counting, ScriptedClient, play, protocol, verbatim

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.errors import ConfigError
from ludic.interaction import SingleAgentProtocol, TraceCollector, merge_step_info
from ludic.interaction.base import derived_seed
from ludic.interaction.single_agent import SingleAgentSyncProtocol, _has_async_env_methods
from ludic.parsers import ParseResult
from ludic.types import Step, StepOutcome


def one(client, env, **run):
    settings = {"max_steps": 5, "env_seed": 3, "sampling_seed": 11, **run}
    (rollout,) = play(protocol(client).run(env=env, **settings)) if "agent" not in run else ()
    return rollout


def test_an_episode_that_ends_is_told_step_by_step():
    client, env = ScriptedClient("a", "b"), Counting(goal=2)
    rollout = one(client, env)
    assert env.seed == 3
    assert env.actions == ["a", "b"]
    first, last = rollout.steps
    assert (first.index, first.prev_obs, first.action, first.next_obs, first.reward) == (0, "start 3", "a", "step 1", 0.0)
    assert (last.prev_obs, last.next_obs, last.reward, last.terminated, last.truncated) == ("step 1", None, 1.0, True, False)
    assert last.info["parsed_action"] == "b"
    assert last.info["n"] == 1
    assert last.trace.completion_token_ids == [98]
    assert rollout.meta == {"agent_name": "agent", "env_name": "Counting", "episode_truncated": False, "truncation_reason": None}
    assert [m["content"] for m in client.requests[1].messages] == ["start 3", "a", "step 1"]


def test_each_step_has_a_sampling_seed_of_its_own_that_follows_from_the_episodes():
    client = ScriptedClient("a")
    one(client, Counting(goal=3))
    seeds = [r.seed for r in client.requests]
    assert seeds == [11, derived_seed(11, 1), derived_seed(11, 2)]
    assert len(set(seeds)) == 3
    assert derived_seed(None, 4) is None
    assert len({derived_seed(s, t) for s in range(100) for t in range(1, 20)}) == 1900


def test_running_out_of_steps_is_a_truncation():
    rollout = one(ScriptedClient("a"), Counting(goal=9), max_steps=2)
    last = rollout.steps[-1]
    assert (last.truncated, last.next_obs, last.info["truncation_reason"]) == (True, None, "max_steps")
    assert (rollout.meta["episode_truncated"], rollout.meta["truncation_reason"]) == (True, "max_steps")
    assert not rollout.steps[0].truncated


def test_a_truncation_by_the_environment_is_its_own():
    rollout = one(ScriptedClient("a"), Counting(goal=1, truncate=True))
    assert (rollout.meta["episode_truncated"], rollout.meta["truncation_reason"]) == (True, "env")
    assert "truncation_reason" not in rollout.steps[-1].info


class Leaving(Counting):
    """Its agent has nothing more to do after one step, though the episode has not ended."""

    @property
    def active_agents(self):
        return [] if self.actions else ["agent_0"]


def test_an_agent_that_is_no_longer_asked_ran_out_of_nothing():
    rollout = one(ScriptedClient("a"), Leaving(goal=9))
    assert rollout.length == 1
    assert (rollout.meta["episode_truncated"], rollout.meta["truncation_reason"]) == (False, None)
    assert not rollout.steps[-1].truncated


def strict(text):
    return ParseResult(None, -1.0, "Say a.") if text != "a" else ParseResult("a", 0.25, None)


def test_an_answer_that_cannot_be_parsed_never_reaches_the_environment():
    client, env = ScriptedClient("z", "a"), Counting(goal=1)
    agent_protocol = protocol(client, parser=strict)
    (rollout,) = play(agent_protocol.run(env=env, max_steps=5))
    failed, played = rollout.steps
    assert (failed.action, failed.next_obs, failed.reward, failed.terminated) == ("z", "Say a.", -1.0, False)
    assert failed.info["parse_error"] is True
    assert failed.trace is not None
    assert played.prev_obs == "Say a."
    assert played.reward == 1.25  # the environment's and the parser's
    assert env.actions == ["a"]
    assert client.requests[1].messages[-1] == {"role": "user", "content": "Say a."}


def test_a_parse_error_ends_the_episode_where_that_is_asked_for():
    agent = Agent(client=ScriptedClient("z"), model="m", ctx=FullDialog(), parser=strict)
    (rollout,) = play(SingleAgentProtocol(agent, stop_on_parse_error=True).run(env=Counting(), max_steps=5))
    assert rollout.length == 1
    assert rollout.steps[0].terminated
    assert rollout.meta["episode_truncated"] is False
    assert agent._ctx.messages[-1]["content"] == "Say a."


def test_a_last_parse_error_keeps_its_feedback_when_the_steps_run_out():
    (rollout,) = play(protocol(ScriptedClient("z"), parser=strict).run(env=Counting(), max_steps=1))
    assert (rollout.steps[-1].next_obs, rollout.steps[-1].truncated) == ("Say a.", True)


class Asynchronous(SingleAgentEnv):
    suggested_sysprompt = "Be brief."

    async def env_reset(self, *, seed=None):
        await asyncio.sleep(0)
        return f"seed {seed}", {}

    async def env_step(self, action):
        await asyncio.sleep(0)
        return StepOutcome("done", 1.0, False, True)

    def env_current_obs(self):
        return ""


def test_environments_may_be_asynchronous():
    assert _has_async_env_methods(Asynchronous()) == (True, True)
    assert _has_async_env_methods(Counting()) == (False, False)
    assert SingleAgentSyncProtocol is SingleAgentProtocol
    client = ScriptedClient("a")
    rollout = one(client, Asynchronous())
    assert rollout.total_reward == 1.0
    assert client.requests[0].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "seed 3"}]


def test_the_agents_own_system_prompt_comes_before_the_environments():
    client = ScriptedClient("a")
    agent = Agent(client=client, model="m", ctx=FullDialog("Mine."), parser=verbatim)
    play(SingleAgentProtocol(agent).run(env=Asynchronous(), max_steps=1))
    assert client.requests[0].messages[0]["content"] == "Mine."


class Two(LudicEnv[str, str, str]):
    agent_ids = active_agents = ("a", "b")

    def reset(self, *, seed=None):
        return {}

    def step(self, actions):
        return {}


def test_two_agents_are_one_too_many():
    with pytest.raises(ConfigError, match="one agent, Two has 2"):
        one(ScriptedClient("a"), Two())


def test_info_is_merged_from_client_to_extra_and_reserved_keys_stay(caplog):
    merged = merge_step_info(client_info={"a": 1, "b": 1}, env_info={"b": 2, "c": 2}, extra={"c": 3})
    assert merged == {"a": 1, "b": 2, "c": 3}
    kept = merge_step_info(client_info={"a": 1}, env_info={"a": 2}, reserved_keys={"a"})
    assert kept == {"a": 1}
    assert "'a' is reserved" in caplog.text


def test_collected_steps_become_a_rollout_for_each_agent():
    collector = TraceCollector(env_name="e")
    collector.add("x", Step(0, "o", "a", None, 1.0, False, True))
    cut = Step(0, "o", "a", None, 0.0, True, False, info={"truncation_reason": "max_steps"})
    collector.add("y", cut)
    by_agent = {r.meta["agent_id"]: r.meta for r in collector.extract_rollouts_with_per_agent_status()}
    assert (by_agent["x"]["episode_truncated"], by_agent["x"]["truncation_reason"]) == (False, None)
    assert (by_agent["y"]["episode_truncated"], by_agent["y"]["truncation_reason"]) == (True, "max_steps")
    together = collector.extract_rollouts(episode_truncated=True, truncation_reason="env")
    assert [r.meta["truncation_reason"] for r in together] == ["env", "env"]
    assert by_agent["x"]["env_name"] == "e"
