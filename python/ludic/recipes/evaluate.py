"""Held-out measurement: the reward of sampled answers, the accuracy of greedy ones, and a few answers to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ludic.envs.tasks import Episode, EpisodicTask, Task, as_episodic
from ludic.envs.tasks.episodic import Played, share
from ludic.inference import InferenceSpec
from ludic.recipes.rollouts import evaluation_inference, request_for
from ludic.recipes.schema import EvaluationSection, RolloutSection
from ludic.training.batching.played_rollouts import PlayedRollouts
from ludic.training.batching.rollout_engine import RolloutEngine
from ludic.types import Rollout

_SHOWN = 8  # answers kept for the report
_PLACE = "held_out_place"  # of an episode among those that were asked for: some may be missing from what comes back
_SAMPLING_SEED = 1_000_000  # before and after are sampled with the same seeds


@dataclass(frozen=True)
class Answer:
    """One sampled episode on a held-out problem."""

    question: str
    text: str
    expected: str
    reward: float | None
    """None: it could not be graded."""
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
    """Plays the task's suites of problems. The same policy gives the same numbers. Also an evaluator, as `Trainer` takes one."""

    def __init__(
        self, engine: RolloutEngine, task: Task | EpisodicTask, section: EvaluationSection, rollout: RolloutSection
    ) -> None:
        self._engine, self._task, self._section, self._rollout = engine, as_episodic(task), section, rollout

    def describe(self) -> str:
        """How many problems there are, and whether they are fewer than were asked for."""
        found, asked = len(next(iter(self._task.suites().values()))), self._section.prompts
        return f"{min(found, asked)} held-out problems" + (
            f"; the task has no more, {asked} were asked for" if found < asked else ""
        )

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
        paired = {name: _paired(suites[name], episodes) for name, episodes in sampled.items()}
        return Evaluation(
            sampled_reward=share(episode.total_reward for _, episode in paired[first]),
            greedy_accuracy=share(self._succeeds(episode) for episode in best),
            facts=self._task.measure(paired),
            answers=[self._answer(problem, place, sampled[first]) for place, problem in enumerate(suites[first][:_SHOWN])],
            num_sampled=len(paired[first]),
            failed=sum(episodes.counts.num_failed_episodes for episodes in [*sampled.values(), best]),
        )

    def _succeeds(self, episode: Rollout) -> bool:
        return episode.total_reward >= self._task.success_reward

    def _answer(self, problem: Episode, place: int, episodes: Sequence[Rollout]) -> Answer:
        """The first episode on the problem at `place`, if it was played to its end and graded."""
        first = next((episode for episode in episodes if episode.meta[_PLACE] == place), None)
        if first is None:
            return Answer(str(problem.get("question", problem["id"])), "", str(problem.get("answer", "")), None)
        shown = self._task.show(problem, first)
        return Answer(shown.question, shown.text, shown.expected, first.total_reward, self._succeeds(first))

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

    async def _play(self, problems: Sequence[Episode], inference: InferenceSpec, **limits: Any) -> PlayedRollouts:
        requests = [
            request_for(problem, inference=inference, seed=_SAMPLING_SEED + place, **{_PLACE: place})
            for place, problem in enumerate(problems)
        ]
        return await self._engine.generate_rollouts(requests=requests, max_steps=self._task.max_turns, **limits)


def _paired(problems: Sequence[Episode], episodes: Sequence[Rollout]) -> list[Played]:
    """Every rollout with its problem; those that failed are missing."""
    return [(problems[episode.meta[_PLACE] % len(problems)], episode) for episode in episodes]
