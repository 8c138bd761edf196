"""What a task of several turns offers, and how a task of one turn is seen as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.parsers import Parser, ParseResult
from ludic.tasks.base import Task
from ludic.types import Message, Rollout

Episode = Mapping[str, Any]
"""What an environment is made of: `id`, and whatever the task needs. JSON values. The
environment's seed decides the rest."""


Played = tuple[Episode, Rollout]


class Turn(NamedTuple):
    """One turn of a demonstration."""

    observation: str
    action: str
    messages: Sequence[Message] | None = None
    """The conversation that the first turn begins with, in place of the observation."""


class Shown(NamedTuple):
    """An episode for people to read."""

    question: str
    text: str
    """What the model did."""
    expected: str


@runtime_checkable
class EpisodicTask(Protocol):
    """A source of episodes and the environments that score them. Stateless: every draw comes
    from the caller's `rng`."""

    @property
    def max_turns(self) -> int:
        """Actions of the longest episode."""

    @property
    def max_new_tokens(self) -> int:
        """Enough tokens for every action of the teacher and the end of the turn, with a little
        to spare."""

    @property
    def system_prompt(self) -> str | None:
        """Where the recipe sets none."""

    @property
    def parser(self) -> Parser:
        """From the model's text to the environment's action. A text that it refuses ends the
        episode."""

    @property
    def cut_off_reward(self) -> float:
        """Reward of an action that ran into the token limit, which ends the episode."""

    @property
    def success_reward(self) -> float | None:
        """Total reward from which an episode is a success; None: the task does not know."""

    @property
    def reward_sees(self) -> str:
        """What the reward looks at, in words, for the report."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Booleans of a step's info, true at one step of an episode at most, that are logged
        beside the reward: key to meaning."""

    @property
    def rates(self) -> Mapping[str, str]:
        """What `measure` gives: key to meaning, the telling ones first."""

    def draw(self, rng: Random) -> Episode:
        """An episode to train on."""

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        """Whole episodes of the imperfect teacher."""

    def make_env(self, episode: Episode) -> SingleAgentEnv:
        """The environment of one episode."""

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        """What is measured, by name: the same in every run, whatever its seed. The first is also
        played greedily."""

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        """Rates of the sampled episodes of each suite."""

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        """One episode to look at."""


@dataclass(frozen=True)
class OneTurn:
    """A task of one turn as a task of episodes."""

    task: Task

    max_turns: ClassVar[int] = 1
    cut_off_reward: ClassVar[float] = 0.0

    @property
    def success_reward(self) -> float | None:
        """1, unless the task says something else."""
        reward: float | None = getattr(self.task, "success_reward", 1.0)
        return reward

    @property
    def max_new_tokens(self) -> int:
        return self.task.max_new_tokens

    @property
    def parser(self) -> Parser:
        return verbatim

    @property
    def reward_sees(self) -> str:
        return self.task.reward_sees

    @property
    def facts(self) -> Mapping[str, str]:
        return self.task.facts

    @property
    def measures(self) -> Mapping[str, str]:
        """Keys of the step's info that hold numbers, and what they mean; a task need not have
        any."""
        measures: Mapping[str, str] = getattr(self.task, "measures", {})
        return measures

    @property
    def rates(self) -> Mapping[str, str]:
        return {**self.task.facts, **self.measures}

    @property
    def system_prompt(self) -> str | None:
        prompt: str | None = getattr(self.task, "system_prompt", None)
        return prompt

    @property
    def scorer(self) -> Any:
        """What rewards the answers in the environment's place; None: the environment does."""
        return getattr(self.task, "scorer", None)

    def draw(self, rng: Random) -> Episode:
        return self.task.draw(rng)

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        problems = [self.task.draw(rng) for _ in range(count)]
        return [[Turn(problem["question"], self.task.demonstrate(problem, rng), _given(problem))] for problem in problems]

    def make_env(self, episode: Episode) -> SingleAgentEnv:
        return self.task.make_env(episode)  # type: ignore[arg-type]

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        return {"held out": self.task.heldout()}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        [answers] = played.values()
        infos = [rollout.steps[-1].info for _, rollout in answers]
        facts = {name: share(bool(info.get(name, False)) for info in infos) for name in self.task.facts}
        return {**facts, **{name: share(info[name] for info in infos if name in info) for name in self.measures}}

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        return Shown(episode["question"], rollout.steps[0].action, episode["answer"])


def _given(problem: Mapping[str, Any]) -> Sequence[Message] | None:
    """The messages of a row of conversations; None where the prompt is one text."""
    prompt = problem["row"]["prompt"] if "row" in problem else None
    return prompt if isinstance(prompt, list) else None


def as_episodic(task: Task | EpisodicTask) -> EpisodicTask:
    """The task itself, or a task of one turn in the form of one of many."""
    return task if isinstance(task, EpisodicTask) else OneTurn(task)


def verbatim(text: str) -> ParseResult:
    """The whole completion is the action."""
    return ParseResult(action=text, reward=0.0, obs=None)


def share(truths: Iterable[bool | float]) -> float:
    """Mean of booleans or numbers; 0 where there are none."""
    values = [float(value) for value in truths]
    return sum(values) / len(values) if values else 0.0


def transcript(rollout: Rollout) -> str:
    """Actions, and between them what the environment answered, on one line."""
    parts = [part for step in rollout.steps for part in (step.action, step.next_obs or "")]
    return " ".join(" ".join(parts[:-1]).split())
