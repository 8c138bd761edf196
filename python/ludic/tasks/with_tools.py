"""A task whose model may call tools before it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ludic.agents.react_agent import CALLS_INFO, FAILED_INFO
from ludic.agents.tool_use import ToolUse
from ludic.tasks.adapters import WrappedTask
from ludic.tasks.episodic import Episode, EpisodicTask, Played, Shown, share, transcript
from ludic.types import Rollout, answers_of

MEASURES = {CALLS_INFO: "calls of tools before an answer", FAILED_INFO: "calls before an answer that failed"}
"""What is measured beside the task's own rates, means over the answers."""


class WithTools(WrappedTask):
    """`task`, in which the model may call tools before each answer. The task sees the answers only;
    people are shown the calls and their results too."""

    def __init__(self, task: EpisodicTask, use: ToolUse) -> None:
        super().__init__(task)
        self._use = use

    @property
    def tool_use(self) -> ToolUse:
        return self._use

    @property
    def measures(self) -> Mapping[str, str]:
        return {**self.task.measures, **MEASURES}

    @property
    def rates(self) -> Mapping[str, str]:
        return {**self.task.rates, **MEASURES}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        answers = {
            suite: [(episode, keep_answers(rollout)) for episode, rollout in episodes] for suite, episodes in played.items()
        }
        infos = [step.info for episodes in answers.values() for _, rollout in episodes for step in rollout.steps]
        means = {name: share(info[name] for info in infos if name in info) for name in MEASURES}
        return {**self.task.measure(answers), **means}

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        shown = self.task.show(episode, keep_answers(rollout))
        return shown._replace(text=transcript(rollout)) if len(rollout.steps) > 1 else shown


def keep_answers(rollout: Rollout) -> Rollout:
    """The rollout without the model calls that called tools."""
    return replace(rollout, steps=answers_of(rollout))
