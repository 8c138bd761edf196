"""One agent in one environment, step by step."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from playing import Counting, ScriptedClient, play, protocol, verbatim

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.errors import ConfigError, RolloutError
from ludic.inference.request import derive_seed
from ludic.interaction import SingleAgentProtocol, TraceCollector, merge_step_info
from ludic.interaction.single_agent import SingleAgentSyncProtocol, _has_async_env_methods
from ludic.parsers import ParseResult
from ludic.types import Step, StepOutcome


def one(client, env, **run):
    settings = {"max_steps": 5, "env_seed": 3, "sampling_seed": 11, **run}
    (rollout,) = play(protocol(client).run(env=env, **settings))
    return rollout


def test_a_terminated_episode_has_one_record_per_step():
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


def test_each_step_derives_its_own_sampling_seed_from_the_episodes():
    client = ScriptedClient("a")
    one(client, Counting(goal=3))
    seeds = [r.seed for r in client.requests]
    assert seeds == [11, derive_seed(11, 1), derive_seed(11, 2)]
    assert len(set(seeds)) == 3
    assert derive_seed(None, 4) is None
    assert len({derive_seed(s, t) for s in range(100) for t in range(1, 20)}) == 1900


def test_running_out_of_steps_is_a_truncation():
    rollout = one(ScriptedClient("a"), Counting(goal=9), max_steps=2)
    last = rollout.steps[-1]
    assert (last.truncated, last.next_obs, last.info["truncation_reason"]) == (True, None, "max_steps")
    assert (rollout.meta["episode_truncated"], rollout.meta["truncation_reason"]) == (True, "max_steps")
    assert not rollout.steps[0].truncated


def test_truncation_by_the_environment_is_marked_as_its_own():
    rollout = one(ScriptedClient("a"), Counting(goal=1, truncate=True))
    assert (rollout.meta["episode_truncated"], rollout.meta["truncation_reason"]) == (True, "env")
    assert "truncation_reason" not in rollout.steps[-1].info


class Leaving(Counting):
    """Its agent is no longer active after one step, though the episode has not ended."""

    @property
    def active_agents(self):
        return [] if self.actions else ["agent_0"]


def test_an_agent_that_is_no_longer_active_is_not_truncated():
    rollout = one(ScriptedClient("a"), Leaving(goal=9))
    assert rollout.length == 1
    assert (rollout.meta["episode_truncated"], rollout.meta["truncation_reason"]) == (False, None)
    assert not rollout.steps[-1].truncated


def strict(text):
    return ParseResult(None, -1.0, "Say a.") if text != "a" else ParseResult("a", 0.25, None)


def test_an_unparsable_answer_never_reaches_the_environment():
    client, env = ScriptedClient("z", "a"), Counting(goal=1)
    agent_protocol = protocol(client, parser=strict)
    (rollout,) = play(agent_protocol.run(env=env, max_steps=5))
    failed, played = rollout.steps
    assert (failed.action, failed.next_obs, failed.reward, failed.terminated) == ("z", "Say a.", -1.0, False)
    assert failed.info["parse_error"] is True
    assert failed.trace is not None
    assert played.prev_obs == "Say a."
    assert played.reward == 1.25  # rewards of the environment and of the parser
    assert env.actions == ["a"]
    assert client.requests[1].messages[-1] == {"role": "user", "content": "Say a."}


def test_a_parse_error_can_end_the_episode():
    agent = Agent(client=ScriptedClient("z"), model="m", ctx=FullDialog(), parser=strict)
    (rollout,) = play(SingleAgentProtocol(agent, stop_on_parse_error=True).run(env=Counting(), max_steps=5))
    assert rollout.length == 1
    assert rollout.steps[0].terminated
    assert rollout.meta["episode_truncated"] is False
    assert agent._ctx.messages[-1]["content"] == "Say a."


def test_a_parse_error_on_the_last_step_keeps_its_feedback():
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


def test_the_agents_system_prompt_overrides_the_environments():
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


def test_an_environment_with_two_agents_is_refused():
    with pytest.raises(ConfigError, match="one agent, and Two has 2"):
        one(ScriptedClient("a"), Two())


def test_info_is_merged_in_order_and_reserved_keys_are_kept(caplog):
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


def test_an_agent_that_is_never_active_has_no_step():
    client, env = ScriptedClient("a"), Leaving(goal=9)
    env.actions.append("another's")
    rollout = one(client, env)
    assert (rollout.steps, client.requests) == ([], [])
    assert (rollout.meta["episode_truncated"], rollout.meta["truncation_reason"]) == (False, None)


def test_max_steps_of_zero_truncates_without_a_step():
    rollout = one(ScriptedClient("a"), Counting(), max_steps=0)
    assert (rollout.steps, rollout.meta["truncation_reason"]) == ([], "max_steps")


def test_terminated_takes_precedence_over_truncated():
    class Both(Counting):
        def env_step(self, action):
            return StepOutcome("o", 1.0, truncated=True, terminated=True)

    rollout = one(ScriptedClient("a"), Both())
    assert rollout.length == 1
    assert (rollout.meta["episode_truncated"], rollout.meta["truncation_reason"]) == (False, None)


def test_the_final_observation_is_not_added_to_the_context():
    chat = protocol(ScriptedClient("a", "b"))
    play(chat.run(env=Counting(goal=2), max_steps=5))
    assert [m["content"] for m in chat.agent._ctx.messages] == ["start None", "a", "step 1", "b"]


def test_empty_parser_feedback_is_still_feedback():
    (rollout,) = play(
        protocol(ScriptedClient("z"), parser=lambda text: ParseResult(None, -1.0, None)).run(env=Counting(), max_steps=1)
    )
    assert rollout.steps[0].next_obs == "Invalid action."


class Wrapping(LudicEnv[str, str, str]):
    """Delegates to an asynchronous environment with plain methods, which therefore return
    coroutines."""

    agent_ids = active_agents = ("agent_0",)

    def __init__(self):
        self.inner = Asynchronous()

    def reset(self, *, seed=None):
        return self.inner.reset(seed=seed)

    def step(self, actions):
        return self.inner.step(actions)


class AllAsynchronous(Wrapping):
    async def reset(self, *, seed=None):
        return {"agent_0": (f"seed {seed}", {})}

    async def step(self, actions):
        return {"agent_0": StepOutcome("done", 1.0, False, True)}


@pytest.mark.parametrize("make", [Wrapping, AllAsynchronous])
def test_any_awaitable_from_an_environment_is_awaited(make):
    rollout = one(ScriptedClient("a"), make())
    assert (rollout.steps[0].prev_obs, rollout.total_reward) == ("seed 3", 1.0)


def test_the_error_of_an_outcome_for_another_agent_names_the_agent():
    class Elsewhere(Counting):
        def step(self, actions):
            return {"b": self.env_step("")}

    with pytest.raises(RolloutError, match=r"Elsewhere .*results for \['b'\] .*'agent_0'"):
        one(ScriptedClient("a"), Elsewhere())


def test_a_slow_model_call_ends_the_episode_with_an_error():
    async def forever():
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        one(ScriptedClient("a", delay=forever), Counting(), timeout_s=0.02)


@given(
    answers=st.lists(st.sampled_from("az"), min_size=1, max_size=6),
    goal=st.integers(1, 4),
    max_steps=st.integers(1, 6),
    truncate=st.booleans(),
    stop=st.booleans(),
)
def test_consecutive_steps_of_an_episode_connect(answers, goal, max_steps, truncate, stop):
    client, env = ScriptedClient(*answers), Counting(goal=goal, truncate=truncate)
    agent = Agent(client=client, model="m", ctx=FullDialog(), parser=strict)
    (rollout,) = play(SingleAgentProtocol(agent, stop_on_parse_error=stop).run(env=env, max_steps=max_steps))
    steps = rollout.steps
    assert [step.index for step in steps] == list(range(len(client.requests)))
    assert 1 <= len(steps) <= max_steps
    assert [step.action for step in steps] == (answers * 6)[: len(steps)]
    assert env.actions == [step.action for step in steps if not step.info.get("parse_error")]
    assert all(after.prev_obs == before.next_obs for before, after in pairwise(steps))
    assert not any(step.terminated or step.truncated for step in steps[:-1])
    assert steps[-1].terminated != steps[-1].truncated
    assert rollout.meta["episode_truncated"] == steps[-1].truncated
    ended = len(env.actions) == goal
    reason = "max_steps" if not ended else "env" if truncate else None
    assert rollout.meta["truncation_reason"] == (None if steps[-1].terminated else reason)
    assert rollout.total_reward == sum(0.25 if step.action == "a" else -1.0 for step in steps) + ended


@given(st.integers(-(2**63), 2**63), st.integers(1, 1000))
def test_a_derived_seed_fits_every_server_and_is_stable(seed, step):
    assert derive_seed(seed, 0) == seed
    assert 0 <= derive_seed(seed, step) < 2**31
    assert derive_seed(seed, step) == derive_seed(seed, step)
    # seed 0, step 1 is the first output of SplitMix64(0), 0xE220A8397B1DCDAF, truncated to 31 bits:
    # 0x7B1DCDAF
    assert derive_seed(0, 1) == 0x7B1DCDAF


def test_members_of_a_group_have_different_seeds_at_every_step():
    """Group members have the seeds base, base + 1, ...; no two of them coincide at any step."""
    seeds = [[derive_seed(1000 + member, step) for step in range(50)] for member in range(64)]
    assert all(len(set(at_step)) == 64 for at_step in zip(*seeds, strict=True))


def test_a_reserved_key_can_be_repeated_with_the_same_value(caplog):
    assert merge_step_info(client_info={"a": 1}, env_info={"a": 1}, extra={"a": 2}, reserved_keys={"a", "new"}) == {"a": 1}
    assert caplog.text.count("is reserved") == 1
    assert merge_step_info(client_info={}, extra={"new": 1}, reserved_keys={"new"}) == {"new": 1}
    client_info = {"a": 1}
    merge_step_info(client_info=client_info, env_info={"a": 2})
    assert client_info == {"a": 1}


def test_a_collector_drops_agents_without_steps():
    collector = TraceCollector()
    assert collector.extract_rollouts() == collector.extract_rollouts_with_per_agent_status() == []
    _ = collector._traces["silent"]
    collector.add("x", Step(0, "o", "a", "n", 0.0, False, False))
    collector.add("x", Step(1, "n", "b", None, 0.0, True, False))
    (rollout,) = collector.extract_rollouts_with_per_agent_status()
    assert [step.index for step in rollout.steps] == [0, 1]
    assert rollout.meta == {"agent_id": "x", "episode_truncated": True, "truncation_reason": "env"}
    assert rollout.id != collector.extract_rollouts()[0].id


def test_environments_and_agents_without_base_classes_can_be_played():
    class Room:
        agent_ids = active_agents = ("agent_0",)

        def reset(self, *, seed=None):
            return {"agent_0": ("start", {})}

        def step(self, actions):
            return {"agent_0": StepOutcome(obs="end", reward=1.0, terminated=True, truncated=False)}

    own = Agent(client=ScriptedClient("a"), model="m", ctx=FullDialog(), parser=verbatim)

    class Plain:
        """A user's own class with only the members that the protocol reads."""

        _ctx = own._ctx
        name = "plain"
        reset, on_env_reset, on_after_step, act = own.reset, own.on_env_reset, own.on_after_step, own.act

    (rollout,) = play(SingleAgentProtocol(Plain()).run(env=Room(), max_steps=2, env_seed=0, sampling_seed=1))
    assert rollout.total_reward == 1.0
