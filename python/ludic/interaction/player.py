"""One agent's side of an episode that others play too."""

from __future__ import annotations

from ludic.agents.base_agent import Agent
from ludic.envs.env import LudicEnv
from ludic.inference.request import InferenceSpec
from ludic.interaction.info import merge_step_info
from ludic.interaction.step_collector import TraceCollector
from ludic.interaction.steps import cut_short, failed_step, intermediate_steps, played_step, system_prompt
from ludic.parsers import ParseResult
from ludic.seeds import agent_seed
from ludic.types import Info, Step, StepOutcome, TokenTrace

NOTHING_YET = StepOutcome(obs="", reward=0.0, truncated=False, terminated=False)


class Player:
    """Keeps what the agent has still to be told, and lets what the environment answers between its
    turns count for its last step.

    The agent is told everything at once, before it acts again: one message, so that its answers and
    what it is told alternate. A step's `next_obs` is what was told after it. A reward that comes
    before the agent's first step is added to that step.
    """

    def __init__(self, agent_id: str, agent: Agent, collector: TraceCollector) -> None:
        self.agent_id = agent_id
        self.agent = agent
        self.finished = False
        """The environment has ended the agent's episode."""
        self._collector = collector
        self._last: Step | None = None
        self._calls = 0
        """Intermediate calls so far; they shift the numbers of the steps."""
        self._begun = False
        self._told = ""
        self._untold: list[str] = []
        self._untold_info: Info = {}
        self._owed = 0.0
        """Reward earned before the first step."""

    def reset(self, env: LudicEnv[str, str, str]) -> None:
        self.agent.reset(system_prompt=system_prompt(self.agent, env))

    def hear(self, obs: str, info: Info) -> None:
        """Something to be told before the agent acts again."""
        self._untold.append(obs)
        self._untold_info = {**self._untold_info, **info}

    def catch_up(self) -> None:
        """Tell the agent what it has not been told."""
        if not self._untold:
            return
        self._told = "\n\n".join(filter(None, self._untold))
        tell = self.agent.on_after_step if self._begun else self.agent.on_env_reset
        tell(self._told, self._untold_info)
        if self._last is not None and not self.finished:
            self._last.next_obs = self._told
        self._begun, self._untold, self._untold_info = True, [], {}

    async def act(
        self, turn: int, inference: InferenceSpec | None, sampling_seed: int | None, timeout_s: float | None
    ) -> tuple[ParseResult, str, Info, TokenTrace | None]:
        """The agent's answer on this turn. The model calls it made before it are kept as steps."""
        self.catch_up()
        answer = await self.agent.act(
            inference=inference, sampling_seed=agent_seed(sampling_seed, self.agent_id, turn), timeout_s=timeout_s
        )
        for step in intermediate_steps(self.agent, turn + self._calls, self._told):
            self._keep(step)
            self._calls += 1
            self._told = step.next_obs or ""
        return answer

    def failed(self, turn: int, answer: tuple[ParseResult, str, Info, TokenTrace | None]) -> None:
        """The answer could not be parsed."""
        parsed, raw, info, trace = answer
        step = failed_step(turn + self._calls, self._told, raw, parsed, info, trace)
        self._keep(step)
        self.hear(step.next_obs or "", step.info)

    def played(self, turn: int, answer: tuple[ParseResult, str, Info, TokenTrace | None], outcome: StepOutcome | None) -> None:
        """The action was played. Without an outcome the environment says later, or never, what
        came of it."""
        parsed, raw, info, trace = answer
        step = played_step(turn + self._calls, self._told, raw, parsed, info, outcome or NOTHING_YET, trace)
        self._keep(step)
        if outcome is None:
            step.next_obs = None
        elif step.next_obs is not None:
            self.hear(step.next_obs, step.info)
        self.finished = step.terminated or step.truncated

    def receive(self, outcome: StepOutcome) -> None:
        """What came of the others' actions, for an agent that did not play one."""
        last, ended = self._last, outcome.terminated or outcome.truncated
        if last is None:
            self._owed += outcome.reward
        else:
            last.reward += outcome.reward
        if not ended:
            self.hear(outcome.obs, outcome.info)
            return
        self.finished = True
        if last is not None:
            last.terminated, last.truncated = outcome.terminated, outcome.truncated
            last.info = merge_step_info(client_info=last.info, env_info=outcome.info)
            if not last.info.get("parse_error"):
                last.next_obs = None

    def close(self, *, ran_out: bool) -> None:
        """The episode is over: the agent is told the rest, all but the end itself. One that the
        environment had not finished with was cut short if the steps ran out."""
        if any(self._untold):
            self.catch_up()
        if ran_out and not self.finished and self._last is not None:
            cut_short(self._last)

    def _keep(self, step: Step) -> None:
        step.reward += self._owed
        self._owed = 0.0
        self._last = step
        self._collector.add(self.agent_id, step)
