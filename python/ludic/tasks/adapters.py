"""Adapters that make an `EpisodicTask` of any task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Protocol, runtime_checkable

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.inference.prompts.template import read_template_kwargs
from ludic.tasks.base import Task, TaskDefaults
from ludic.tasks.episodic import OPTIONAL_MEMBERS, Episode, EpisodicTask, Played, Shown, Turn, share
from ludic.types import Message, Rollout
from ludic.user_objects import forward_members


@runtime_checkable
class _HasSuites(Protocol):
    """A task of episodes; a task of one turn has no suites."""

    def suites(self) -> Mapping[str, Sequence[Episode]]: ...


def as_episodic(task: Task | EpisodicTask) -> EpisodicTask:
    """`task` itself if it is an `EpisodicTask`, else an adapter around it.

    A class of the user's need not subclass anything: with `suites` it is a task of episodes,
    without a task of one turn. Its members are read when they are needed, so a member that is set
    or changed later counts from then on.
    """
    if isinstance(task, EpisodicTask):
        return task
    return WrappedTask(task) if isinstance(task, _HasSuites) else OneTurn(task)


@forward_members("task", OPTIONAL_MEMBERS)
class WrappedTask(EpisodicTask):
    """Passes everything on to `task`, which is an `EpisodicTask` or an object of the user's with
    its abstract members. A subclass overrides what differs."""

    def __init__(self, task: Any) -> None:
        self.task: EpisodicTask = task

    @property
    def max_turns(self) -> int:
        return self.task.max_turns

    @property
    def max_new_tokens(self) -> int:
        return self.task.max_new_tokens

    @property
    def reward_sees(self) -> str:
        return self.task.reward_sees

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


@forward_members("task", (*TaskDefaults.__annotations__, "training_scorer", "rates", "aclose"))
class OneTurn(TaskDefaults, EpisodicTask):
    """A task of one turn as a task of episodes."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @property
    def max_turns(self) -> int:
        return 1

    @property
    def max_new_tokens(self) -> int:
        return self.task.max_new_tokens

    @property
    def reward_sees(self) -> str:
        return self.task.reward_sees

    @property
    def facts(self) -> Mapping[str, str]:
        return self.task.facts

    def draw(self, rng: Random) -> Episode:
        return self.task.draw(rng)

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        problems = [self.task.draw(rng) for _ in range(count)]
        return [
            [Turn(each["question"], self.task.demonstrate(each, rng), prompt_messages(each), _kwargs(each))] for each in problems
        ]

    def make_env(self, episode: Episode) -> SingleAgentEnv:
        return self.task.make_env(episode)  # type: ignore[arg-type]

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        return {"held out": self.task.heldout()}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        [answers] = played.values()
        infos = [rollout.steps[-1].info for _, rollout in answers]
        facts = {name: share(bool(info.get(name, False)) for info in infos) for name in self.facts}
        each = [name for name in self.rates if name in self.measures]
        together = {} if self.measure_answers is None else self.measure_answers(answers)
        return {**facts, **{name: share(info[name] for info in infos if name in info) for name in each}, **together}

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        return Shown(episode["question"], rollout.steps[-1].action, episode["answer"])


def _kwargs(problem: Mapping[str, Any]) -> dict[str, Any]:
    return read_template_kwargs(problem.get("row") or {}, f"problem {problem['id']}")


def prompt_messages(problem: Mapping[str, Any]) -> Sequence[Message] | None:
    """The messages of a problem with a conversation as prompt; None if the prompt is text."""
    prompt = problem["row"]["prompt"] if "row" in problem else None
    return prompt if isinstance(prompt, list) else None
