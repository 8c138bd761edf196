"""Plays several agents in one environment, simultaneously or in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError
from ludic.inference.request import InferenceSpec
from ludic.interaction.base import InteractionProtocol, await_results
from ludic.interaction.containment import run_contained
from ludic.interaction.player import Player
from ludic.interaction.step_collector import TraceCollector
from ludic.parsers import ParseResult
from ludic.types import Info, Rollout, TokenTrace

Answer = tuple[ParseResult, str, Info, TokenTrace | None]


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
            raise ConfigError(
                f"MultiAgentProtocol has agents {unknown}, {type(env).__name__} has {sorted(env.agent_ids)}; "
                "name each agent as the environment does"
            )
        players = [Player(agent_id, agent, collector) for agent_id, agent in self.agent_map.items()]
        for player in players:
            player.reset(env)
            if player.agent_id in first:
                player.add_observation(*first[player.agent_id])
        return players


async def _step_env(env: LudicEnv[str, str, str], turn: int, players: Sequence[Player], answers: Mapping[str, Answer]) -> None:
    """Step the environment with the actions of this turn, and pass the outcomes to the players."""
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
