"""Everything that can be given as a task, as an `EpisodicTask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Protocol, runtime_checkable

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.parsers import Parser
from ludic.tasks.base import ProblemList, Task
from ludic.tasks.episodic import Episode, EpisodicTask, Played, Shown, Turn, share
from ludic.training.types import RolloutScorer
from ludic.types import Message, Rollout


@runtime_checkable
class _HasSuites(Protocol):
    """What a task of episodes has and a task of one turn does not."""

    def suites(self) -> Mapping[str, Sequence[Episode]]: ...


def as_episodic(task: Task | EpisodicTask) -> EpisodicTask:
    """`task` itself if it is an `EpisodicTask`, else an adapter around it.

    A class of the user's need not subclass anything: with `suites` it is a task of episodes,
    without a task of one turn.
    """
    if isinstance(task, EpisodicTask):
        return task
    return StructuralTask(task) if isinstance(task, _HasSuites) else OneTurn(task)


class WrappedTask(EpisodicTask):
    """Passes everything on to `task`; a subclass overrides what differs."""

    def __init__(self, task: EpisodicTask) -> None:
        self.task = task

    @property
    def max_turns(self) -> int:
        return self.task.max_turns

    @property
    def max_new_tokens(self) -> int:
        return self.task.max_new_tokens

    @property
    def system_prompt(self) -> str | None:
        return self.task.system_prompt

    @property
    def parser(self) -> Parser:
        return self.task.parser

    @property
    def cut_off_reward(self) -> float:
        return self.task.cut_off_reward

    @property
    def success_reward(self) -> float | None:
        return self.task.success_reward

    @property
    def reward_sees(self) -> str:
        return self.task.reward_sees

    @property
    def facts(self) -> Mapping[str, str]:
        return self.task.facts

    @property
    def rates(self) -> Mapping[str, str]:
        return self.task.rates

    @property
    def measures(self) -> Mapping[str, str]:
        return self.task.measures

    @property
    def scorer(self) -> RolloutScorer | None:
        return self.task.scorer

    @property
    def sees_cut_off_answers(self) -> bool:
        return self.task.sees_cut_off_answers

    @property
    def problem_list(self) -> ProblemList | None:
        return self.task.problem_list

    def draw(self, rng: Random) -> Episode:
        return self.task.draw(rng)

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        return self.task.demonstrations(count, rng)

    def make_env(self, episode: Episode) -> SingleAgentEnv:
        return self.task.make_env(episode)

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        return self.task.suites()

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        return self.task.measure(played)

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        return self.task.show(episode, rollout)


class StructuralTask(WrappedTask):
    """A task of episodes whose class does not subclass `EpisodicTask`. Optional members that it
    lacks have their defaults."""

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self._measures: Mapping[str, str] = getattr(task, "measures", {})
        self._scorer: RolloutScorer | None = getattr(task, "scorer", None)

    @property
    def measures(self) -> Mapping[str, str]:
        return self._measures

    @property
    def scorer(self) -> RolloutScorer | None:
        return self._scorer

    @property
    def sees_cut_off_answers(self) -> bool:
        return self._scorer is not None

    @property
    def problem_list(self) -> ProblemList | None:
        return None


class OneTurn(EpisodicTask):
    """A task of one turn as a task of episodes. Optional members that it lacks have their
    defaults."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._system_prompt: str | None = getattr(task, "system_prompt", None)
        self._success_reward: float | None = getattr(task, "success_reward", 1.0)
        self._measures: Mapping[str, str] = getattr(task, "measures", {})
        self._scorer: RolloutScorer | None = getattr(task, "scorer", None)
        self._problem_list: ProblemList | None = getattr(task, "problem_list", None)

    @property
    def max_turns(self) -> int:
        return 1

    @property
    def max_new_tokens(self) -> int:
        return self._task.max_new_tokens

    @property
    def reward_sees(self) -> str:
        return self._task.reward_sees

    @property
    def system_prompt(self) -> str | None:
        return self._system_prompt

    @property
    def success_reward(self) -> float | None:
        return self._success_reward

    @property
    def facts(self) -> Mapping[str, str]:
        return self._task.facts

    @property
    def measures(self) -> Mapping[str, str]:
        return self._measures

    @property
    def scorer(self) -> RolloutScorer | None:
        return self._scorer

    @property
    def problem_list(self) -> ProblemList | None:
        return self._problem_list

    def draw(self, rng: Random) -> Episode:
        return self._task.draw(rng)

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        problems = [self._task.draw(rng) for _ in range(count)]
        return [
            [Turn(problem["question"], self._task.demonstrate(problem, rng), prompt_messages(problem))] for problem in problems
        ]

    def make_env(self, episode: Episode) -> SingleAgentEnv:
        return self._task.make_env(episode)  # type: ignore[arg-type]

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        return {"held out": self._task.heldout()}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        [answers] = played.values()
        infos = [rollout.steps[-1].info for _, rollout in answers]
        facts = {name: share(bool(info.get(name, False)) for info in infos) for name in self.facts}
        return {**facts, **{name: share(info[name] for info in infos if name in info) for name in self.measures}}

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        return Shown(episode["question"], rollout.steps[0].action, episode["answer"])


def prompt_messages(problem: Mapping[str, Any]) -> Sequence[Message] | None:
    """The messages of a problem whose prompt is a conversation; None where it is text."""
    prompt = problem["row"]["prompt"] if "row" in problem else None
    return prompt if isinstance(prompt, list) else None
