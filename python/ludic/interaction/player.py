"""One agent in an episode with several agents."""

from __future__ import annotations

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.inference.request import InferenceSpec
from ludic.inference.sampling import agent_seed
from ludic.interaction.info import merge_step_info
from ludic.interaction.step_collector import TraceCollector
from ludic.interaction.steps import make_failed_step, make_intermediate_steps, make_played_step, mark_truncated, system_prompt
from ludic.parsers import ParseResult
from ludic.types import Info, Step, StepOutcome, TokenTrace

NO_OUTCOME = StepOutcome(obs="", reward=0.0, truncated=False, terminated=False)


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
        self._last_obs = ""
        self._pending: list[str] = []
        self._pending_info: Info = {}
        self._early_reward = 0.0
        """Reward received before the first step."""

    def reset(self, env: LudicEnv[str, str, str]) -> None:
        self.agent.reset(system_prompt=system_prompt(self.agent, env))

    def add_observation(self, obs: str, info: Info) -> None:
        """Add an observation for the agent's next action."""
        self._pending.append(obs)
        self._pending_info = {**self._pending_info, **info}

    def deliver_observations(self) -> None:
        """Pass the pending observations to the agent."""
        if not self._pending:
            return
        self._last_obs = "\n\n".join(filter(None, self._pending))
        notify = self.agent.on_after_step if self._has_observed else self.agent.on_env_reset
        notify(self._last_obs, self._pending_info)
        if self._last is not None and not self.finished:
            self._last.next_obs = self._last_obs
        self._has_observed, self._pending, self._pending_info = True, [], {}

    async def act(
        self, turn: int, inference: InferenceSpec | None, sampling_seed: int | None, timeout_s: float | None
    ) -> tuple[ParseResult, str, Info, TokenTrace | None]:
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

    def add_failed_step(self, turn: int, answer: tuple[ParseResult, str, Info, TokenTrace | None]) -> None:
        """Add the step of an answer that could not be parsed."""
        parsed, raw, info, trace = answer
        step = make_failed_step(turn + self._calls, self._last_obs, raw, parsed, info, trace)
        self._add_step(step)
        self.add_observation(step.next_obs or "", step.info)

    def add_played_step(
        self, turn: int, answer: tuple[ParseResult, str, Info, TokenTrace | None], outcome: StepOutcome | None
    ) -> None:
        """Add the step of an action. Without an outcome, the environment reports it later or
        never."""
        parsed, raw, info, trace = answer
        step = make_played_step(turn + self._calls, self._last_obs, raw, parsed, info, outcome or NO_OUTCOME, trace)
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
