"""One agent and one environment, in turn."""

from __future__ import annotations

import inspect
from typing import Any

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, RolloutError
from ludic.inference.request import InferenceSpec
from ludic.interaction.base import InteractionProtocol, derived_seed
from ludic.interaction.info import merge_step_info
from ludic.parsers import ParseResult
from ludic.types import Info, Rollout, Step, StepOutcome, TokenTrace

INVALID_ACTION = "Invalid action."


def _has_async_env_methods(env: LudicEnv[str, str, str]) -> tuple[bool, bool]:
    """Whether `env_reset` and `env_step` are coroutine functions."""
    return (
        inspect.iscoroutinefunction(getattr(env, "env_reset", None)),
        inspect.iscoroutinefunction(getattr(env, "env_step", None)),
    )


class SingleAgentProtocol(InteractionProtocol):
    """The agent acts, the environment answers, until it ends the episode or `max_steps` are played.

    An answer that cannot be parsed never reaches the environment: it becomes a step with the parser's reward and feedback, and ends
    the episode if `stop_on_parse_error`.
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
        for index in range(max_steps):
            if agent_id not in env.active_agents:
                inactive = True
                break
            parsed, raw, client_info, trace = await self.agent.act(
                inference=inference, sampling_seed=derived_seed(sampling_seed, index), timeout_s=timeout_s
            )
            if parsed.action is None:
                step = self._failed_parse(index, obs, raw, parsed, client_info, trace)
            else:
                outcome = await _advance(env, agent_id, parsed.action)
                step = _played(index, obs, raw, parsed, client_info, outcome, trace)
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
            obs, info = await _own(env.reset(seed=env_seed), env, agent_id)
        prompt = self.agent._ctx.default_system_prompt or getattr(env, "suggested_sysprompt", None)
        if not isinstance(obs, str):
            raise RolloutError(f"reset of {type(env).__name__} gave an observation of type {type(obs).__name__}; it must be text")
        self.agent.reset(system_prompt=prompt)
        self.agent.on_env_reset(obs, info)
        return obs

    def _failed_parse(
        self, index: int, obs: str, raw: str, parsed: ParseResult, client_info: Info, trace: TokenTrace | None
    ) -> Step:
        return Step(
            index=index,
            prev_obs=obs,
            action=raw,
            next_obs=parsed.obs or INVALID_ACTION,
            reward=parsed.reward,
            truncated=False,
            terminated=self.stop_on_parse_error,
            info=merge_step_info(client_info=client_info, extra={"parse_error": True}),
            trace=trace,
        )

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
        outcome = await _own(env.step({agent_id: action}), env, agent_id)
    return outcome


async def _own(by_agent: Any, env: LudicEnv[str, str, str], agent_id: str) -> Any:
    """The agent's part of what `reset` or `step` returned; either may be an awaitable."""
    by_agent = await by_agent if inspect.isawaitable(by_agent) else by_agent
    if agent_id not in by_agent:
        raise RolloutError(f"{type(env).__name__} answered {sorted(by_agent)} and not {agent_id!r}, the agent that acts in it")
    own = by_agent[agent_id]
    return await own if inspect.isawaitable(own) else own


def _played(
    index: int, obs: str, raw: str, parsed: ParseResult, client_info: Info, outcome: StepOutcome, trace: TokenTrace | None
) -> Step:
    """A step that the environment answered: its reward and the parser's add up."""
    ended = outcome.terminated or outcome.truncated
    return Step(
        index=index,
        prev_obs=obs,
        action=raw,
        next_obs=None if ended else outcome.obs,
        reward=outcome.reward + parsed.reward,
        truncated=outcome.truncated,
        terminated=outcome.terminated,
        info=merge_step_info(client_info=client_info, env_info=outcome.info, extra={"parsed_action": parsed.action}),
        trace=trace,
    )


def _close(steps: list[Step], *, inactive: bool) -> tuple[bool, str | None]:
    """(truncated, reason) of the episode. Running out of steps marks the last one; an agent that the environment no longer asks ran out
    of none, and its steps stay as they are."""
    if steps and steps[-1].terminated:
        return False, None
    if steps and steps[-1].truncated:
        return True, "env"
    if inactive:
        return False, None
    if steps:
        last = steps[-1]
        last.truncated = True
        last.info["truncation_reason"] = "max_steps"
        if not last.info.get("parse_error"):
            last.next_obs = None
    return True, "max_steps"
