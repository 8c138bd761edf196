"""Plays several agents in one environment, simultaneously or in turn."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError
from ludic.event_loop import run_contained
from ludic.images.content import join_contents
from ludic.inference.request import InferenceSpec, agent_seed
from ludic.interaction.single_agent import (
    Answer,
    InteractionProtocol,
    await_results,
    make_failed_step,
    make_intermediate_steps,
    make_played_step,
    mark_truncated,
    merge_step_info,
    system_prompt,
)
from ludic.types import Info, Observation, Rollout, Step, StepOutcome

NO_OUTCOME = StepOutcome(obs="", reward=0.0, truncated=False, terminated=False)


class TraceCollector:
    """Collects the steps of each agent. `global_meta` is added to the meta of every rollout."""

    def __init__(self, **global_meta: Any) -> None:
        self._global_meta = global_meta
        self._traces: defaultdict[str, list[Step]] = defaultdict(list)

    def add(self, agent_id: str, step: Step) -> None:
        self._traces[agent_id].append(step)

    def extract_rollouts(self, *, episode_truncated: bool = False, truncation_reason: str | None = None) -> list[Rollout]:
        """One rollout for each agent with a step, all with the same status."""
        return [
            self._rollout(agent_id, episode_truncated, truncation_reason) for agent_id, steps in self._traces.items() if steps
        ]

    def extract_rollouts_with_per_agent_status(self) -> list[Rollout]:
        """One rollout for each agent with a step, with the status of its last step."""
        return [self._rollout(agent_id, *_status(steps[-1])) for agent_id, steps in self._traces.items() if steps]

    def _rollout(self, agent_id: str, truncated: bool, reason: str | None) -> Rollout:
        meta = {
            **self._global_meta,
            "agent_id": agent_id,
            "episode_truncated": truncated,
            "truncation_reason": reason,
        }
        return Rollout(steps=list(self._traces[agent_id]), meta=meta)


def _status(last: Step) -> tuple[bool, str | None]:
    """(truncated, reason) of an agent's episode."""
    if last.truncated and not last.terminated:
        return True, last.info.get("truncation_reason", "env")
    return False, None


class Player:
    """Collects an agent's observations between its turns, and adds rewards between its turns to its
    last step.

    The agent gets all pending observations as one message before its next action, so that its
    messages alternate with the environment's. That message is the `next_obs` of its last step. A
    reward before the agent's first step is added to that step.
    """

    def __init__(self, agent_id: str, agent: Agent, collector: TraceCollector) -> None:
        self.agent_id = agent_id
        self.agent = agent
        self.finished = False
        """Whether the environment ended the agent's episode."""
        self._collector = collector
        self._last: Step | None = None
        self._calls = 0
        """Number of intermediate calls so far, which shift the indices of the steps."""
        self._has_observed = False
        self._last_obs: Observation = ""
        self._pending: list[Observation] = []
        self._pending_info: Info = {}
        self._early_reward = 0.0
        """Reward received before the first step."""

    def add_observation(self, obs: Observation, info: Info) -> None:
        """Add an observation for the agent's next action."""
        self._pending.append(obs)
        self._pending_info = {**self._pending_info, **info}

    def deliver_observations(self) -> None:
        """Pass the pending observations to the agent."""
        if not self._pending:
            return
        self._last_obs = join_contents(self._pending, "\n\n")
        notify = self.agent.on_after_step if self._has_observed else self.agent.on_env_reset
        notify(self._last_obs, self._pending_info)
        if self._last is not None and not self.finished:
            self._last.next_obs = self._last_obs
        self._has_observed, self._pending, self._pending_info = True, [], {}

    async def act(self, turn: int, inference: InferenceSpec | None, sampling_seed: int | None, timeout_s: float | None) -> Answer:
        """The agent's answer on this turn. Its intermediate model calls are added as steps."""
        self.deliver_observations()
        answer = await self.agent.act(
            inference=inference, sampling_seed=agent_seed(sampling_seed, self.agent_id, turn), timeout_s=timeout_s
        )
        for step in make_intermediate_steps(self.agent, turn + self._calls, self._last_obs):
            self._add_step(step)
            self._calls += 1
            self._last_obs = step.next_obs or ""
        return answer

    def add_failed_step(self, turn: int, answer: Answer) -> None:
        """Add the step of an answer that could not be parsed."""
        step = make_failed_step(turn + self._calls, self._last_obs, answer)
        self._add_step(step)
        self.add_observation(step.next_obs or "", step.info)

    def add_played_step(self, turn: int, answer: Answer, outcome: StepOutcome | None) -> None:
        """Add the step of an action. Without an outcome, the environment reports it later or
        never."""
        step = make_played_step(turn + self._calls, self._last_obs, answer, outcome or NO_OUTCOME)
        self._add_step(step)
        if outcome is None:
            step.next_obs = None
        elif step.next_obs is not None:
            self.add_observation(step.next_obs, step.info)
        self.finished = step.terminated or step.truncated

    def receive_outcome(self, outcome: StepOutcome) -> None:
        """Process the outcome of other agents' actions, for an agent that did not act."""
        last, ended = self._last, outcome.terminated or outcome.truncated
        if last is None:
            self._early_reward += outcome.reward
        else:
            last.reward += outcome.reward
        if not ended:
            self.add_observation(outcome.obs, outcome.info)
            return
        self.finished = True
        if last is not None:
            last.terminated, last.truncated = outcome.terminated, outcome.truncated
            last.info = merge_step_info(client_info=last.info, env_info=outcome.info)
            if not last.info.get("parse_error"):
                last.next_obs = None

    def close(self, *, ran_out: bool) -> None:
        """End the episode: deliver the pending observations, except the final one. Mark the last
        step as truncated if the steps ran out before the environment ended the agent's episode."""
        if any(self._pending):
            self.deliver_observations()
        if ran_out and not self.finished and self._last is not None:
            mark_truncated(self._last)

    def _add_step(self, step: Step) -> None:
        step.reward += self._early_reward
        self._early_reward = 0.0
        self._last = step
        self._collector.add(self.agent_id, step)


class MultiAgentProtocol(InteractionProtocol):
    """On every turn all active agents act concurrently, and the environment is stepped with their
    actions.

    Agents of the environment that are not in `agents` are played by the environment: on their turns
    it is stepped without an action. Outcomes for agents that did not act count as well: the agent
    sees them before its next action, their rewards are added to its last step, and they can end its
    episode. An action that cannot be parsed is not passed to the environment, which is not stepped
    if there is no other action. Each agent has its own sampling seed on every turn.

    Returns a rollout for each agent that acted, with `agent_id` in its meta. The index of a step is
    its turn plus the number of the agent's intermediate model calls so far.
    """

    def __init__(self, agents: Mapping[str, Agent]) -> None:
        if not agents:
            raise ConfigError("agents is empty; pass an agent for at least one of the environment's agent_ids")
        self.agent_map: dict[str, Agent] = dict(agents)

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
        collector = TraceCollector(protocol=type(self).__name__, env_name=type(env).__name__, agents=list(self.agent_map))
        players = await self._reset(env, env_seed, collector)
        for turn in range(max_steps):
            active = set(env.active_agents)
            if not active or all(player.finished for player in players):
                break
            acting = [player for player in players if player.agent_id in active and not player.finished]
            answers = await _act_concurrently([player.act(turn, inference, sampling_seed, timeout_s) for player in acting])
            await _step_env(env, turn, players, {p.agent_id: answer for p, answer in zip(acting, answers, strict=True)})
        ran_out = bool(env.active_agents)
        for player in players:
            player.close(ran_out=ran_out)
        return collector.extract_rollouts_with_per_agent_status()

    async def _reset(self, env: LudicEnv[str, str, str], env_seed: int | None, collector: TraceCollector) -> list[Player]:
        """Reset the environment and every agent. Agents without a first observation get theirs
        later."""
        first = await await_results(env.reset(seed=env_seed))
        unknown = sorted(set(self.agent_map) - set(env.agent_ids))
        if unknown:
            raise ConfigError(f"agents {unknown} must be among {sorted(env.agent_ids)}, the agents of {type(env).__name__}")
        players = [Player(agent_id, agent, collector) for agent_id, agent in self.agent_map.items()]
        for player in players:
            player.agent.reset(system_prompt=system_prompt(player.agent, env))
            if player.agent_id in first:
                player.add_observation(*first[player.agent_id])
        return players


async def _step_env(env: LudicEnv[str, str, str], turn: int, players: Sequence[Player], answers: Mapping[str, Answer]) -> None:
    actions = {agent_id: answer[0].action for agent_id, answer in answers.items() if answer[0].action is not None}
    stepped = bool(actions) or not answers
    outcomes = await await_results(env.step(actions)) if stepped else {}
    for player in players:
        outcome = outcomes.get(player.agent_id)
        if player.agent_id in actions:
            player.add_played_step(turn, answers[player.agent_id], outcome)
            continue
        if player.agent_id in answers:
            player.add_failed_step(turn, answers[player.agent_id])
        if outcome is not None and not player.finished:
            player.receive_outcome(outcome)


async def _act_concurrently(acts: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """All answers. If one fails, the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_contained(act, what="the turn of an agent")) for act in acts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
