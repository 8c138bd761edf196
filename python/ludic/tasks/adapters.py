"""Tasks around tasks: an `EpisodicTask` of any object with the members of a task, and a task whose
model may call tools before it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from ludic.agents.tool_agent import CALLS_INFO, FAILED_INFO, ToolUse
from ludic.envs.env import SingleAgentEnv
from ludic.inference.prompts.template import read_template_kwargs
from ludic.tasks.episodic import Episode, EpisodicTask, Played, Shown, Task, Turn, share, transcript
from ludic.types import Message, Rollout, answers_of
from ludic.user_objects import forward_members

_WITH_DEFAULT = [name for name in vars(EpisodicTask) if not name.startswith("_") and name not in EpisodicTask.__abstractmethods__]


def as_episodic(task: Task | EpisodicTask) -> EpisodicTask:
    """`task` itself if it is an `EpisodicTask`, else an adapter around it.

    A class of the user's need not subclass anything: with `suites`, or with `max_turns` and no
    `heldout`, it is a task of episodes, else a task of one turn. Its members are read when they are
    needed, so a member that is set or changed later counts from then on.
    """
    if isinstance(task, EpisodicTask):
        return task
    has_episodes = hasattr(task, "suites") or (hasattr(task, "max_turns") and not hasattr(task, "heldout"))
    return WrappedTask(task) if has_episodes else OneTurn(task)


@forward_members("task", _WITH_DEFAULT)
class WrappedTask(EpisodicTask):
    """Has the members of `task`, an `EpisodicTask` or an object of the user's, and the defaults of
    `EpisodicTask` for those that it lacks. A subclass overrides what differs."""

    def __init__(self, task: Any) -> None:
        self.task = task

    @property
    def max_turns(self) -> int:
        return self.task.max_turns

    def draw(self, rng: Random) -> Episode:
        return self.task.draw(rng)

    def make_env(self, episode: Episode) -> SingleAgentEnv:
        return self.task.make_env(episode)


class OneTurn(WrappedTask):
    """A task of one turn, with the members of `Task`, as a task of episodes."""

    @property
    def max_turns(self) -> int:
        return 1

    @property
    def success_reward(self) -> float | None:
        return getattr(self.task, "success_reward", 1.0)

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]] | None:
        if not hasattr(self.task, "demonstrate"):
            return None
        problems = [self.task.draw(rng) for _ in range(count)]
        turns = []
        for each in problems:
            kwargs = read_template_kwargs(each.get("row") or {}, f"problem {each['id']}")
            turns.append([Turn(each["question"], self.task.demonstrate(each, rng), prompt_messages(each), kwargs)])
        return turns

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        return {"held out": self.task.heldout()}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        rates = super().measure(played)
        if hasattr(self.task, "measure_answers"):
            rates |= self.task.measure_answers([answer for answers in played.values() for answer in answers])
        return rates

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        return Shown(episode["question"], rollout.steps[-1].action, episode["answer"])


def prompt_messages(problem: Mapping[str, Any]) -> Sequence[Message] | None:
    """The messages of a problem with a conversation as prompt; None if the prompt is text."""
    prompt = problem["row"]["prompt"] if "row" in problem else None
    return prompt if isinstance(prompt, list) else None


MEASURES = {CALLS_INFO: "calls of tools before an answer", FAILED_INFO: "calls before an answer that failed"}
"""Metrics in addition to the task's own rates, means over the answers."""


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
