"""Held-out measurement: the reward of sampled answers, the accuracy of greedy ones, and a few answers to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ludic.envs.tasks import Episode, EpisodicTask
from ludic.envs.tasks.episodic import Played, share
from ludic.inference import InferenceSpec
from ludic.recipes.rollouts import evaluation_inference, request_for
from ludic.recipes.schema import EvaluationSection, RolloutSection
from ludic.training.batching.rollout_engine import RolloutEngine
from ludic.types import Rollout

_SHOWN = 8  # answers kept for the report
_SAMPLING_SEED = 1_000_000  # before and after are sampled with the same seeds


@dataclass(frozen=True)
class Answer:
    """One sampled episode on a held-out problem."""

    question: str
    text: str
    expected: str
    reward: float
    success: bool = False


@dataclass(frozen=True)
class Evaluation:
    """What was measured at one moment of a run."""

    sampled_reward: float
    """Mean over `samples_per_prompt` answers to each problem."""
    greedy_accuracy: float
    """Share of problems whose greedy answer is a success."""
    facts: dict[str, float]
    """What the task measures of the sampled episodes beside the reward."""
    answers: list[Answer]
    """The first sampled answers."""

    def rates(self) -> dict[str, float]:
        """The numbers, without the answers."""
        return {"sampled_reward": self.sampled_reward, "greedy_accuracy": self.greedy_accuracy, **self.facts}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evaluation:
        return cls(**{**values, "answers": [Answer(**answer) for answer in values["answers"]]})


class HeldOut:
    """Plays the task's suites of problems. The same policy gives the same numbers. Also an evaluator, as `Trainer` takes one."""

    def __init__(self, engine: RolloutEngine, task: EpisodicTask, section: EvaluationSection, rollout: RolloutSection) -> None:
        self._engine, self._task, self._section, self._rollout = engine, task, section, rollout

    async def measure(self, *, concurrency: int | None = None, timeout_s: float | None = None) -> Evaluation:
        """Every problem sampled, and those of the first suite answered greedily."""
        suites = {name: list(problems[: self._section.prompts]) for name, problems in self._task.suites().items()}
        sampling, greedy = (evaluation_inference(self._rollout, self._task, greedy=flag) for flag in (False, True))
        limits = {"concurrency": concurrency or self._rollout.concurrency, "timeout_s": timeout_s}
        sampled = {
            name: await self._play(problems * self._section.samples_per_prompt, sampling, **limits)
            for name, problems in suites.items()
        }
        first = next(iter(suites))
        best = await self._play(suites[first], greedy, **limits)
        return Evaluation(
            sampled_reward=share(episode.total_reward for _, episode in sampled[first]),
            greedy_accuracy=share(self._succeeds(episode) for _, episode in best),
            facts=self._task.measure(sampled),
            answers=[self._answer(problem, episode) for problem, episode in sampled[first][: min(_SHOWN, len(suites[first]))]],
        )

    def _succeeds(self, episode: Rollout) -> bool:
        return episode.total_reward >= self._task.success_reward

    def _answer(self, problem: Episode, episode: Rollout) -> Answer:
        shown = self._task.show(problem, episode)
        return Answer(shown.question, shown.text, shown.expected, episode.total_reward, self._succeeds(episode))

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
        return [asdict(answer) for answer in measured.answers], measured.rates()

    async def _play(self, problems: Sequence[Episode], inference: InferenceSpec, **limits: Any) -> list[Played]:
        requests = [
            request_for(problem, inference=inference, seed=_SAMPLING_SEED + index) for index, problem in enumerate(problems)
        ]
        rollouts = await self._engine.generate_rollouts(requests=requests, max_steps=self._task.max_turns, **limits)
        return list(zip(problems, rollouts, strict=True))
