"""The interface of interaction protocols, and the steps that they build from an agent's
answers and the outcomes of the environment."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.event_loop import await_if_needed
from ludic.inference.request import InferenceSpec
from ludic.parsers import ParseResult
from ludic.types import Info, Rollout, Step, StepOutcome, TokenTrace


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
    """The results of `reset` or `step` by agent. The dictionary and its values may be
    awaitables."""
    by_agent = await await_if_needed(results)
    return {agent_id: await await_if_needed(result) for agent_id, result in by_agent.items()}


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


def make_intermediate_steps(agent: Agent, index: int, obs: str) -> list[Step]:
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


def make_failed_step(index: int, obs: str, answer: Answer, *, ends: bool = False) -> Step:
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


def make_played_step(index: int, obs: str, answer: Answer, outcome: StepOutcome) -> Step:
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
