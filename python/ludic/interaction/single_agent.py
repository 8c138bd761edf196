"""Plays one agent in one environment."""

from __future__ import annotations

import inspect
from typing import Any

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, RolloutError
from ludic.inference.request import InferenceSpec, derive_seed
from ludic.interaction.base import (
    InteractionProtocol,
    await_results,
    make_failed_step,
    make_intermediate_steps,
    make_played_step,
    mark_truncated,
    system_prompt,
)
from ludic.types import Rollout, Step, StepOutcome


def _has_async_env_methods(env: LudicEnv[str, str, str]) -> tuple[bool, bool]:
    """Whether `env_reset` and `env_step` are coroutine functions."""
    return (
        inspect.iscoroutinefunction(getattr(env, "env_reset", None)),
        inspect.iscoroutinefunction(getattr(env, "env_step", None)),
    )


class SingleAgentProtocol(InteractionProtocol):
    """Alternates between agent and environment until the environment ends the episode or after
    `max_steps` steps.

    An answer that cannot be parsed never reaches the environment. It becomes a step with the
    parser's reward and feedback; with `stop_on_parse_error` it ends the episode. Intermediate model
    calls of the agent become steps with reward 0; `max_steps` does not count them.
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
        ids = list(env.agent_ids)
        if len(ids) != 1:
            raise ConfigError(f"SingleAgentProtocol needs one agent, and {type(env).__name__} has {len(ids)}: {ids}")
        [agent_id] = ids
        obs = await self._reset(env, agent_id, env_seed)
        steps: list[Step] = []
        inactive = False
        for turn in range(max_steps):
            if agent_id not in env.active_agents:
                inactive = True
                break
            answer = await self.agent.act(
                inference=inference, sampling_seed=derive_seed(sampling_seed, turn), timeout_s=timeout_s
            )
            for call in make_intermediate_steps(self.agent, len(steps), obs):
                steps.append(call)
                obs = call.next_obs or ""
            action = answer[0].action
            if action is None:
                step = make_failed_step(len(steps), obs, answer, ends=self.stop_on_parse_error)
            else:
                step = make_played_step(len(steps), obs, answer, await _step_env(env, agent_id, action))
            steps.append(step)
            obs = step.next_obs or ""
            if step.next_obs is not None:
                self.agent.on_after_step(step.next_obs, step.info)
            if step.terminated or step.truncated:
                break
        truncated, reason = _end_episode(steps, inactive=inactive)
        meta = {
            "agent_name": self.agent.name,
            "env_name": type(env).__name__,
            "episode_truncated": truncated,
            "truncation_reason": reason,
        }
        return [Rollout(steps=steps, meta=meta)]

    async def _reset(self, env: LudicEnv[str, str, str], agent_id: str, env_seed: int | None) -> str:
        """Reset environment and agent. Returns the first observation."""
        if _has_async_env_methods(env)[0]:
            obs, info = await env.env_reset(seed=env_seed)  # type: ignore[attr-defined]
        else:
            obs, info = _select_agent(await await_results(env.reset(seed=env_seed)), env, agent_id)
        if not isinstance(obs, str):
            raise RolloutError(f"reset of {type(env).__name__} returned an observation of {type(obs).__name__}; it must be text")
        self.agent.reset(system_prompt=system_prompt(self.agent, env))
        self.agent.on_env_reset(obs, info)
        return obs


SingleAgentSyncProtocol = SingleAgentProtocol


async def _step_env(env: LudicEnv[str, str, str], agent_id: str, action: str) -> StepOutcome:
    if _has_async_env_methods(env)[1]:
        outcome: StepOutcome = await env.env_step(action)  # type: ignore[attr-defined]
    else:
        outcome = _select_agent(await await_results(env.step({agent_id: action})), env, agent_id)
    return outcome


def _select_agent(by_agent: dict[str, Any], env: LudicEnv[str, str, str], agent_id: str) -> Any:
    """The agent's value in the result of `reset` or `step`."""
    if agent_id not in by_agent:
        raise RolloutError(f"{type(env).__name__} returned results for {sorted(by_agent)} and not for its agent {agent_id!r}")
    return by_agent[agent_id]


def _end_episode(steps: list[Step], *, inactive: bool) -> tuple[bool, str | None]:
    """(truncated, reason) of the episode. If it ran out of steps, its last step is marked as
    truncated; an agent that became inactive did not run out of steps."""
    if steps and steps[-1].terminated:
        return False, None
    if steps and steps[-1].truncated:
        return True, "env"
    if inactive:
        return False, None
    if steps:
        mark_truncated(steps[-1])
    return True, "max_steps"
