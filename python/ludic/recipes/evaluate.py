"""Held-out measurement: the reward of sampled answers, the accuracy of greedy ones, and a few answers to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ludic.envs.tasks import Problem, Task
from ludic.inference import InferenceSpec
from ludic.recipes.measures import rates_of
from ludic.recipes.rollouts import evaluation_inference, request_for
from ludic.recipes.schema import EvaluationSection, RolloutSection
from ludic.training.batching.played_rollouts import PlayedRollouts
from ludic.training.batching.rollout_engine import RolloutEngine
from ludic.types import Rollout

_SHOWN = 8  # answers kept for the report
_SAMPLING_SEED = 1_000_000  # before and after are sampled with the same seeds


@dataclass(frozen=True)
class Answer:
    """One sampled answer to a held-out problem."""

    question: str
    text: str
    expected: str
    reward: float | None
    """None: it could not be graded."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured at one moment of a run."""

    sampled_reward: float
    """Mean over `samples_per_prompt` answers to each problem."""
    greedy_accuracy: float
    """Share of problems whose greedy answer earns the full reward."""
    facts: dict[str, float]
    """Share of sampled answers for which each of the task's facts holds, and means of its measures."""
    answers: list[Answer]
    """The first sampled answers."""
    num_sampled: int = 0
    """How many answers were sampled."""
    failed: int = 0
    """Episodes that failed; they are in no mean."""

    def rates(self) -> dict[str, float]:
        """The numbers, without the answers."""
        return {"sampled_reward": self.sampled_reward, "greedy_accuracy": self.greedy_accuracy, **self.facts}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evaluation:
        return cls(**{**values, "answers": [Answer(**answer) for answer in values["answers"]]})


class HeldOut:
    """Plays the held-out problems. The same policy gives the same numbers. Also an evaluator, as `Trainer` takes one."""

    def __init__(self, engine: RolloutEngine, task: Task, section: EvaluationSection, rollout: RolloutSection) -> None:
        self._engine, self._task, self._section, self._rollout = engine, task, section, rollout

    def describe(self) -> str:
        """How many problems there are, and whether they are fewer than were asked for."""
        found, asked = len(self._task.heldout()), self._section.prompts
        return f"{min(found, asked)} held-out problems" + (
            f"; the task has no more, {asked} were asked for" if found < asked else ""
        )

    async def measure(self, *, concurrency: int | None = None, timeout_s: float | None = None) -> Evaluation:
        """Every problem sampled and answered greedily."""
        problems = self._problems()
        sampling, greedy = (evaluation_inference(self._rollout, self._task, greedy=flag) for flag in (False, True))
        limits = {"concurrency": concurrency or self._rollout.concurrency, "timeout_s": timeout_s}
        sampled = await self._play(list(problems) * self._section.samples_per_prompt, sampling, **limits)
        best = await self._play(problems, greedy, **limits)
        return Evaluation(
            sampled_reward=_mean([episode.total_reward for episode in sampled]),
            greedy_accuracy=_mean([float(episode.total_reward >= 1.0) for episode in best]),
            facts=rates_of(self._task, sampled),
            answers=[_answer(problem, sampled) for problem in problems[:_SHOWN]],
            num_sampled=len(sampled),
            failed=sampled.counts.num_failed_episodes + best.counts.num_failed_episodes,
        )

    def _problems(self) -> Sequence[Problem]:
        return self._task.heldout()[: self._section.prompts]

    async def eval(
        self,
        *,
        requests: Any = None,
        reducers: Any = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """(sampled answers, rates). Requests, reducers and steps are those of the task."""
        measured = await self.measure(concurrency=concurrency, timeout_s=timeout_s)
        return [asdict(answer) for answer in measured.answers], {
            **measured.rates(),
            "num_failed_episodes": float(measured.failed),
        }

    async def _play(self, problems: Sequence[Problem], inference: InferenceSpec, **limits: Any) -> PlayedRollouts:
        requests = [
            request_for(problem, inference=inference, seed=_SAMPLING_SEED + index) for index, problem in enumerate(problems)
        ]
        return await self._engine.generate_rollouts(requests=requests, max_steps=1, **limits)


def _answer(problem: Problem, episodes: Sequence[Rollout]) -> Answer:
    """The first answer to `problem`, if one of them could be graded."""
    first = next((episode for episode in episodes if episode.meta["problem_id"] == problem["id"]), None)
    if first is None:
        return Answer(problem["question"], "", problem["answer"], None)
    return Answer(problem["question"], first.steps[0].action, problem["answer"], first.total_reward)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
