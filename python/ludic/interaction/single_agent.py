"""How one agent plays an episode in one environment; the interface of interaction protocols; and
the steps that they make of an agent's answers and the outcomes of the environment."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, RolloutError
from ludic.event_loop import await_if_needed
from ludic.images.content import find_digests, intern_messages, intern_observation, is_content, list_image_parts
from ludic.images.store import current_store
from ludic.inference.request import InferenceSpec, derive_seed
from ludic.parsers import ParseResult
from ludic.types import Info, Observation, Rollout, Step, StepOutcome, TokenTrace


class InteractionProtocol(ABC):
    """Plays one episode and returns a rollout for each agent."""

    @abstractmethod
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
        """Play an episode. `timeout_s` is the deadline of each model call, after which TimeoutError
        is raised."""


async def await_results(results: Any) -> dict[str, Any]:
    """The results of `reset` or `step` by agent, with their images in the store. The dictionary and
    its values may be awaitables."""
    by_agent = await await_if_needed(results)
    return {agent_id: store_images(await await_if_needed(result)) for agent_id, result in by_agent.items()}


def store_images(result: Any) -> Any:
    """What an environment's `reset` or `step` returned for an agent, with content in place of
    images. Raises DataError for an observation that cannot be shown to a model."""
    if isinstance(result, StepOutcome):
        ended = result.terminated or result.truncated
        return result if ended or _is_shown(result.obs) else replace(result, obs=intern_observation(result.obs, current_store()))
    if not (isinstance(result, tuple) and len(result) == 2):
        return result
    obs, info = result
    messages = info.get("messages") if isinstance(info, dict) else None
    if isinstance(messages, list) and any(not find_digests([part]) for part in list_image_parts(messages)):
        info = {**info, "messages": intern_messages(messages, current_store(), where="messages of a reset: ")}
    return (obs if _is_shown(obs) else intern_observation(obs, current_store())), info


def _is_shown(obs: Any) -> bool:
    """Whether there is nothing to store. Numbers are refused where rollouts are checked."""
    return obs is None or isinstance(obs, int | float) or is_content(obs)


logger = logging.getLogger(__name__)

INVALID_ACTION = "Invalid action."
Answer = tuple[ParseResult, str, Info, TokenTrace | None]
"""What `Agent.act` returns."""
RESERVED_INFO_KEYS: frozenset[str] = frozenset()
_MISSING = object()


def merge_step_info(
    *,
    client_info: Mapping[str, Any],
    env_info: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    reserved_keys: Collection[str] = frozenset(),
) -> dict[str, Any]:
    """The client's info, overridden by the environment's, overridden by `extra`. Reserved keys are
    not overridden; a different value for one is logged as a warning."""
    merged = dict(client_info)
    reserved = RESERVED_INFO_KEYS | set(reserved_keys)
    for source in (env_info or {}, extra or {}):
        for key, value in source.items():
            if key in reserved and merged.get(key, _MISSING) not in (_MISSING, value):
                logger.warning("info key %r is reserved: kept %r, ignored %r", key, merged[key], value)
                continue
            merged[key] = value
    return merged


def make_intermediate_steps(agent: Agent, index: int, obs: Observation) -> list[Step]:
    """A step for each intermediate model call of the agent, numbered from `index`. These steps did
    not reach the environment and have reward 0, so their credit comes from the later steps of the
    rollout. Their info has `intermediate_call`."""
    steps: list[Step] = []
    for call in getattr(agent, "intermediate_calls", ()):
        step = Step(
            index=index + len(steps),
            prev_obs=obs,
            action=call.text,
            next_obs=call.result,
            reward=0.0,
            truncated=False,
            terminated=False,
            info=merge_step_info(client_info=call.info, extra={"intermediate_call": True}),
            trace=call.trace,
        )
        steps.append(step)
        obs = call.result
    return steps


def make_failed_step(index: int, obs: Observation, answer: Answer, *, ends: bool = False) -> Step:
    """The step of an answer that could not be parsed and did not reach the environment."""
    parsed, raw, client_info, trace = answer
    return Step(
        index=index,
        prev_obs=obs,
        action=raw,
        next_obs=parsed.obs or INVALID_ACTION,
        reward=parsed.reward,
        truncated=False,
        terminated=ends,
        info=merge_step_info(client_info=client_info, extra={"parse_error": True}),
        trace=trace,
    )


def make_played_step(index: int, obs: Observation, answer: Answer, outcome: StepOutcome) -> Step:
    """The step of an action. Its reward is the environment's plus the parser's."""
    parsed, raw, client_info, trace = answer
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


def mark_truncated(last: Step) -> None:
    """Mark the last step as truncated by `max_steps`. Its next observation is removed unless it is
    a parser's feedback."""
    last.truncated = True
    last.info["truncation_reason"] = "max_steps"
    if not last.info.get("parse_error"):
        last.next_obs = None


def system_prompt(agent: Agent, env: LudicEnv[str, str, str]) -> str | None:
    """The default system prompt of the agent's context, else the one that the environment
    suggests. Neither agent nor environment needs our base class."""
    return agent._ctx.default_system_prompt or getattr(env, "suggested_sysprompt", None)


def _has_async_env_methods(env: LudicEnv[str, str, str]) -> tuple[bool, bool]:
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

    def __init__(self, agent: Agent, *, stop_on_parse_error: bool = False, max_steps: int | None = None) -> None:
        """`max_steps`: the most steps of an episode, whatever more `run` allows."""
        self.agent = agent
        self.max_steps = max_steps
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
        for turn in range(max_steps if self.max_steps is None else min(max_steps, self.max_steps)):
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

    async def _reset(self, env: LudicEnv[str, str, str], agent_id: str, env_seed: int | None) -> Observation:
        """Reset environment and agent. Returns the first observation."""
        if _has_async_env_methods(env)[0]:
            obs, info = store_images(await env.env_reset(seed=env_seed))  # type: ignore[attr-defined]
        else:
            obs, info = _select_agent(await await_results(env.reset(seed=env_seed)), env, agent_id)
        if not is_content(obs):
            raise RolloutError(f"reset of {type(env).__name__} returned an observation of {type(obs).__name__}; it must be text")
        self.agent.reset(system_prompt=system_prompt(self.agent, env))
        self.agent.on_env_reset(obs, info)
        shown: Observation = obs
        return shown


SingleAgentSyncProtocol = SingleAgentProtocol


async def _step_env(env: LudicEnv[str, str, str], agent_id: str, action: str) -> StepOutcome:
    if _has_async_env_methods(env)[1]:
        outcome: StepOutcome = store_images(await env.env_step(action))  # type: ignore[attr-defined]
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
