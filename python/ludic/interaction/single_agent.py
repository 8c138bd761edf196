"""One agent and one environment, in turn."""

from __future__ import annotations

import inspect
from typing import Any

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, RolloutError
from ludic.inference.request import InferenceSpec
from ludic.interaction.answers import answers_of
from ludic.interaction.base import InteractionProtocol
from ludic.interaction.steps import cut_short, failed_step, intermediate_steps, played_step, system_prompt
from ludic.seeds import derived_seed
from ludic.types import Rollout, Step, StepOutcome


def _has_async_env_methods(env: LudicEnv[str, str, str]) -> tuple[bool, bool]:
    """Whether `env_reset` and `env_step` are coroutine functions."""
    return (
        inspect.iscoroutinefunction(getattr(env, "env_reset", None)),
        inspect.iscoroutinefunction(getattr(env, "env_step", None)),
    )


class SingleAgentProtocol(InteractionProtocol):
    """The agent acts, the environment answers, until it ends the episode or `max_steps` are played.

    An answer that cannot be parsed never reaches the environment: it becomes a step with the
    parser's reward and feedback, and ends the episode if `stop_on_parse_error`. Model calls that an
    agent makes before it acts become steps too, without a reward of their own; `max_steps` does not
    count them.
    """

    def __init__(self, agent: Agent, *, stop_on_parse_error: bool = False) -> None:
        self.agent = agent
        self.stop_on_parse_error = stop_on_parse_error

    async def run(
        self,
        *,
        env: LudicEnv[str, str, str],
        max_steps: int,
        env_seed: int | None = None,
        sampling_seed: int | None = None,
        inference: InferenceSpec | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        agent_id = _only_agent(env)
        obs = await self._begin(env, agent_id, env_seed)
        steps: list[Step] = []
        inactive = False
        for turn in range(max_steps):
            if agent_id not in env.active_agents:
                inactive = True
                break
            parsed, raw, client_info, trace = await self.agent.act(
                inference=inference, sampling_seed=derived_seed(sampling_seed, turn), timeout_s=timeout_s
            )
            for call in intermediate_steps(self.agent, len(steps), obs):
                steps.append(call)
                obs = call.next_obs or ""
            if parsed.action is None:
                step = failed_step(len(steps), obs, raw, parsed, client_info, trace, ends=self.stop_on_parse_error)
            else:
                outcome = await _advance(env, agent_id, parsed.action)
                step = played_step(len(steps), obs, raw, parsed, client_info, outcome, trace)
            steps.append(step)
            obs = step.next_obs or ""
            if step.next_obs is not None:
                self.agent.on_after_step(step.next_obs, step.info)
            if step.terminated or step.truncated:
                break
        truncated, reason = _close(steps, inactive=inactive)
        return [Rollout(steps=steps, meta=self._meta(env, truncated, reason))]

    async def _begin(self, env: LudicEnv[str, str, str], agent_id: str, env_seed: int | None) -> str:
        """Reset environment and agent; the first observation."""
        if _has_async_env_methods(env)[0]:
            obs, info = await env.env_reset(seed=env_seed)  # type: ignore[attr-defined]
        else:
            obs, info = _own(await answers_of(env.reset(seed=env_seed)), env, agent_id)
        if not isinstance(obs, str):
            raise RolloutError(f"reset of {type(env).__name__} gave an observation of type {type(obs).__name__}; it must be text")
        self.agent.reset(system_prompt=system_prompt(self.agent, env))
        self.agent.on_env_reset(obs, info)
        return obs

    def _meta(self, env: LudicEnv[str, str, str], truncated: bool, reason: str | None) -> dict[str, Any]:
        return {
            "agent_name": self.agent.name,
            "env_name": type(env).__name__,
            "episode_truncated": truncated,
            "truncation_reason": reason,
        }


SingleAgentSyncProtocol = SingleAgentProtocol


def _only_agent(env: LudicEnv[str, str, str]) -> str:
    ids = list(env.agent_ids)
    if len(ids) != 1:
        raise ConfigError(f"SingleAgentProtocol needs an environment with one agent, {type(env).__name__} has {len(ids)}: {ids}")
    return ids[0]


async def _advance(env: LudicEnv[str, str, str], agent_id: str, action: str) -> StepOutcome:
    if _has_async_env_methods(env)[1]:
        outcome: StepOutcome = await env.env_step(action)  # type: ignore[attr-defined]
    else:
        outcome = _own(await answers_of(env.step({agent_id: action})), env, agent_id)
    return outcome


def _own(by_agent: dict[str, Any], env: LudicEnv[str, str, str], agent_id: str) -> Any:
    """The agent's part of what `reset` or `step` returned."""
    if agent_id not in by_agent:
        raise RolloutError(f"{type(env).__name__} answered {sorted(by_agent)} and not {agent_id!r}, the agent that acts in it")
    return by_agent[agent_id]


def _close(steps: list[Step], *, inactive: bool) -> tuple[bool, str | None]:
    """(truncated, reason) of the episode. Running out of steps marks the last one; an agent that
    the environment no longer asks ran out of none, and its steps stay as they are."""
    if steps and steps[-1].terminated:
        return False, None
    if steps and steps[-1].truncated:
        return True, "env"
    if inactive:
        return False, None
    if steps:
        cut_short(steps[-1])
    return True, "max_steps"
