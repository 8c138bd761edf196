"""Held-out measurement: the mean reward of sampled answers, the accuracy of greedy answers, and
a few answers to look at.

`ludic train` measures all suites of the task, sampled and greedy, before and after training; `ludic
eval` measures one of them. Both sample the same answers: with one seed they are equal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ludic.errors import ConfigError
from ludic.eval.evaluator import ProblemEvaluator
from ludic.eval.statistics import Interval, mean_interval, share_interval
from ludic.eval.tally import PROBLEM_KEY, SAMPLE_KEY, average_by_key
from ludic.recipes.build import check_callbacks
from ludic.recipes.mixture import Mixture, Source
from ludic.recipes.schema import EvaluationSection, Recipe, RolloutSection
from ludic.recipes.sections import build_info_seed
from ludic.runs.directory import RunDirectory
from ludic.runs.rollouts import make_evaluation_inference, make_request
from ludic.tasks import Episode, EpisodicTask, Task, as_episodic
from ludic.tasks.episodic import share
from ludic.tasks.rewards import success_of
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.protocol import bare_name
from ludic.training.info_seed import SeedEvaluator
from ludic.training.reward_scorer import SCORE_INFO
from ludic.training.rollouts.engine import RolloutEngine
from ludic.types import Rollout

_SHOWN = 8  # answers in the report
_OF_ALL = ("sampled_reward", "greedy_accuracy", "greedy_reward")  # rates over all environments


@dataclass(frozen=True)
class Answer:
    """One sampled episode on a held-out problem."""

    question: str
    text: str
    expected: str
    reward: float | None
    """None if it could not be graded."""
    success: bool | None = None
    """None if nothing defines a right answer."""
    calls: str = ""
    """The model calls before the answer, as in a `Shown`."""


@dataclass(frozen=True)
class Evaluation:
    """The result of one measurement."""

    sampled_reward: float
    """Mean over `samples_per_prompt` sampled answers per problem."""
    greedy_accuracy: float | None
    """Share of problems with a successful greedy answer; None if nothing defines success."""
    facts: dict[str, float]
    """Rates that the task measures on the sampled episodes, in addition to the reward."""
    answers: list[Answer]
    """The first sampled answers."""
    num_sampled: int = 0
    """Number of sampled answers."""
    failed: int = 0
    """Number of failed episodes; they are in no mean."""
    greedy_reward: float | None = None
    """Mean reward of the greedy answers."""
    solved_at: float | None = None
    """An answer counts as a success from this reward on; None if nothing defines success."""
    sampled_right: float | None = None
    """Share of the sampled answers that are successes."""
    by_problem: dict[str, list[float | None]] = field(default_factory=dict)
    """For some rates, one number per problem, in their order; None if all episodes on a problem
    failed."""
    environments: dict[str, Evaluation] = field(default_factory=dict)
    """Of a run with several environments the measurement of each, by its name."""

    def rates(self) -> dict[str, float]:
        """The rates without the answers; of an environment as `NAME/RATE`."""
        greedy = {"greedy_accuracy": self.greedy_accuracy, "greedy_reward": self.greedy_reward}
        first = [(name, rate) for name, rate in greedy.items() if rate is not None][:1]
        own = {f"{name}/{key}": rate for name, each in self.environments.items() for key, rate in each.rates().items()}
        return {"sampled_reward": self.sampled_reward, **dict(first), **self.facts, **own}

    def interval(self, name: str) -> Interval | None:
        """The 95 % interval of a rate over problems; None for a rate that is not known per
        problem."""
        environment, _, rate = name.partition("/")
        if environment in self.environments:
            return self.environments[environment].interval(rate)
        values = [value for value in self.by_problem.get(name, ()) if value is not None]
        if not values:
            return None
        if all(0 <= value <= 1 for value in values):
            return share_interval(values, answers=len(values) if name.startswith("greedy") else self.num_sampled)
        return mean_interval(values)

    def without_accuracy(self) -> Evaluation:
        """The measurement without what depends on a definition of success."""
        unmarked = [replace(answer, success=None) for answer in self.answers]
        return replace(self, greedy_accuracy=None, solved_at=None, sampled_right=None, answers=unmarked)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evaluation:
        own = {name: cls.from_dict(each) for name, each in values.get("environments", {}).items()}
        return cls(**{**values, "answers": [Answer(**answer) for answer in values["answers"]], "environments": own})

    @classmethod
    def together(cls, environments: dict[str, Evaluation]) -> Evaluation:
        """The measurement of all problems of the environments, which count the same each."""
        each = list(environments.values())
        shown = -(-_SHOWN // len(each))
        answers = [
            replace(answer, question=f"{name}: {answer.question}")
            for name, one in environments.items()
            for answer in one.answers[:shown]
        ]
        sampled, greedy = (
            [sum(value is not None for value in one.by_problem[rate]) for one in each]
            for rate in ("sampled_reward", "greedy_reward")
        )
        common = set(each[0].by_problem).intersection(*(one.by_problem for one in each))
        thresholds = {one.solved_at for one in each}
        return cls(
            sampled_reward=_mean([one.sampled_reward for one in each], sampled) or 0.0,
            greedy_accuracy=_mean([one.greedy_accuracy for one in each], greedy),
            facts={},
            answers=answers,
            num_sampled=sum(one.num_sampled for one in each),
            failed=sum(one.failed for one in each),
            greedy_reward=_mean([one.greedy_reward for one in each], greedy),
            solved_at=thresholds.pop() if len(thresholds) == 1 else None,
            sampled_right=_mean([one.sampled_right for one in each], sampled),
            by_problem={key: [value for one in each for value in one.by_problem[key]] for key in sorted(common)},
            environments=environments,
        )


def _mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """None if a value is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(map(operator.mul, known, weights)) / max(1, sum(weights))


def make_comparable(before: Evaluation | None, after: Evaluation | None) -> tuple[Evaluation | None, Evaluation | None]:
    """Two measurements of one run, made comparable: if only one has an accuracy, both are
    returned without."""
    if before is None or after is None or (before.greedy_accuracy is None) == (after.greedy_accuracy is None):
        return before, after
    return before.without_accuracy(), after.without_accuracy()


def check_watched_metrics(recipe: Recipe, warmup_cfg: TrainerConfig, cfg: TrainerConfig, task: EpisodicTask) -> None:
    """Raise `ConfigError` for early stopping or callbacks by a metric that is not measured."""
    measured = list_measured(recipe, task)
    for section, settings in (("warmup.trainer", warmup_cfg), ("trainer", cfg)):
        name = settings.early_stopping_metric
        if settings.early_stopping_patience is not None and not {name, bare_name(name)} & set(measured):
            raise ConfigError(f"{section}.early_stopping_metric ({name}) must be one of {', '.join(measured)}")
    check_callbacks(recipe.callbacks, cfg, measured=measured)


def list_measured(recipe: Recipe, task: EpisodicTask) -> list[str]:
    """The metrics of an evaluation of this run, InfoSeed's too."""
    if isinstance(task, Mixture):
        own = {name: list_measured(source.recipe, source.task) for name, source in task.sources.items()}
        everywhere = [key for key in _OF_ALL if all(key in keys for keys in own.values())]
        return [*everywhere, *(f"{name}/{key}" for name, keys in own.items() for key in keys)]
    success, seeds = success_of(task, recipe.evaluation.solved_at), recipe.info_seed
    greedy = ["greedy_accuracy"] if success.reward is not None and not success.is_assumed else []
    by_seed = ["eval_seed/pass_at_n"] if seeds.num_seeds and seeds.eval_samples else []
    if by_seed and seeds.num_seeds > 1:
        by_seed += ["eval_seed/pred_acc", "eval_seed/diversity_l2"]
    return ["sampled_reward", *greedy, "greedy_reward", *task.rates, *by_seed]


def make_evaluator(
    engine: RolloutEngine,
    task: EpisodicTask,
    problems: Mapping[Any, Episode],
    rollout: RolloutSection,
    *,
    k: int,
    seed: int,
    greedy: bool = False,
    **settings: Any,
) -> ProblemEvaluator:
    """`k` answers to each of the problems, which are named by their keys, with the sampling of
    training or greedy. `settings` are fields of the evaluator."""
    inference = make_evaluation_inference(rollout, task, greedy=greedy)
    requests = [
        make_request(problem, inference=inference, seed=None, **{PROBLEM_KEY: name}) for name, problem in problems.items()
    ]
    settings = {"concurrency": rollout.concurrency, "max_steps": task.max_turns, **settings}
    return ProblemEvaluator(engine, lambda: requests, k=k, seed=seed, **settings)


class HeldOut:
    """Measures the policy on the task's held-out problems, as an evaluator of `Trainer` and at
    both ends of a run. The same policy and `seed` give the same numbers."""

    def __init__(
        self,
        engine: RolloutEngine,
        task: Task | EpisodicTask,
        section: EvaluationSection,
        rollout: RolloutSection,
        *,
        seed: int = 0,
        seeds: SeedEvaluator | None = None,
    ) -> None:
        """With `seeds` it measures `eval_seed/*` too, and writes a heat map each time."""
        self._engine, self._task, self._section, self._rollout, self._seed = engine, as_episodic(task), section, rollout, seed
        self.success, self._seeds = success_of(self._task, section.solved_at), seeds
        self.current_step: Callable[[], int] = lambda: 0
        """The step of the policy that is measured, where a trainer says it."""

    def describe(self) -> str:
        """The number of problems, in words, and whether it is less than `evaluation.prompts`."""
        available, requested = len(next(iter(self._task.suites().values()))), self._section.prompts
        return f"{min(available, requested)} held-out problems" + (
            f"; the task has no more, {requested} were requested" if available < requested else ""
        )

    async def measure(self, *, concurrency: int | None = None, timeout_s: float | None = None) -> Evaluation:
        """Sample answers to all problems, and answer the problems of the first suite greedily."""
        suites = {name: list(problems[: self._section.prompts]) for name, problems in self._task.suites().items()}
        limits: dict[str, Any] = {"concurrency": concurrency, "timeout_s": timeout_s}
        k = self._section.samples_per_prompt
        sampled = {name: await self._sample(problems, k=k, **limits) for name, problems in suites.items()}
        first = next(iter(suites))
        best = await self._sample(suites[first], k=1, greedy=True, **limits)
        requested = k * sum(map(len, suites.values())) + len(suites[first])
        paired = {
            name: [(suites[name][episode.meta[PROBLEM_KEY]], episode) for episode in episodes]
            for name, episodes in sampled.items()
        }
        rewards = [episode.total_reward for _, episode in paired[first]]
        greedy_rewards = [episode.total_reward for episode in best]
        solved_at = self.success.holds_for([*rewards, *greedy_rewards])
        shown = enumerate(suites[first][:_SHOWN])
        measured = Evaluation(
            sampled_reward=share(rewards),
            greedy_accuracy=None if solved_at is None else share(reward >= solved_at for reward in greedy_rewards),
            facts=self._task.measure(paired),
            answers=[self._build_answer(problem, place, sampled[first], solved_at) for place, problem in shown],
            num_sampled=len(rewards),
            failed=requested - sum(map(len, [*sampled.values(), best])),
            greedy_reward=share(greedy_rewards),
            solved_at=solved_at,
            sampled_right=None if solved_at is None else share(reward >= solved_at for reward in rewards),
            by_problem=_collect_by_problem(len(suites[first]), sampled[first], best, solved_at),
        )
        if self._seeds is None:
            return measured
        self._seeds.step = self.current_step()
        _, metrics = await self._seeds.eval(**limits)
        return replace(measured, facts={**measured.facts, **metrics})

    def _build_answer(self, problem: Episode, place: int, episodes: Sequence[Rollout], solved_at: float | None) -> Answer:
        """The first answer to the problem at `place`; without text if it failed."""
        first = next((each for each in episodes if (each.meta[PROBLEM_KEY], each.meta[SAMPLE_KEY]) == (place, 0)), None)
        if first is None:
            return Answer(str(problem.get("question", problem["id"])), "", str(problem.get("answer", "")), None)
        shown = self._task.show(problem, first)
        reward = first.total_reward
        success = None if solved_at is None else reward >= solved_at
        return Answer(shown.question, shown.text, shown.expected, reward, success, shown.calls)

    async def eval(
        self,
        *,
        requests: Any = None,
        reducers: Any = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """(sampled answers, rates). `requests`, `reducers` and `max_steps` are ignored: the task
        has its own."""
        measured = await self.measure(concurrency=concurrency, timeout_s=timeout_s)
        rates = measured.rates()
        for prefix, each in {"": measured, **{f"{name}/": each for name, each in measured.environments.items()}}.items():
            rates |= {f"{prefix}greedy_reward": each.greedy_reward or 0.0, f"{prefix}num_failed_episodes": float(each.failed)}
        return [asdict(answer) for answer in measured.answers], rates

    async def _sample(self, problems: Sequence[Episode], *, k: int, greedy: bool = False, **limits: Any) -> list[Rollout]:
        """The answers to the problems, which are named by their places."""
        named = dict(enumerate(problems))
        evaluator = make_evaluator(self._engine, self._task, named, self._rollout, k=k, seed=self._seed, greedy=greedy)
        return await evaluator.sample(**limits)


class HeldOutOfEach(HeldOut):
    """Measures the policy on the held-out problems of each environment, with its own settings."""

    def __init__(self, own: Mapping[str, HeldOut]) -> None:
        self._own = own
        self.current_step = lambda: 0

    def describe(self) -> str:
        return ", ".join(f"{each.describe()} of {name}" for name, each in self._own.items())

    async def measure(self, *, concurrency: int | None = None, timeout_s: float | None = None) -> Evaluation:
        limits: dict[str, Any] = {"concurrency": concurrency, "timeout_s": timeout_s}
        return Evaluation.together({name: await each.measure(**limits) for name, each in self._own.items()})


def _collect_by_problem(
    count: int, sampled: Sequence[Rollout], greedy: Sequence[Rollout], solved_at: float | None
) -> dict[str, list[float | None]]:
    """The means per problem from which the report computes intervals; None for a problem without
    any episode."""
    values = {
        "sampled_reward": [(episode, episode.total_reward) for episode in sampled],
        "greedy_reward": [(episode, episode.total_reward) for episode in greedy],
    }
    if solved_at is not None:
        values["greedy_accuracy"] = [(episode, float(episode.total_reward >= solved_at)) for episode in greedy]
    scores = [(episode, episode.steps[-1].info.get(SCORE_INFO)) for episode in sampled]
    if scored := [(episode, score) for episode, score in scores if score is not None]:
        values[SCORE_INFO] = scored
    numbers: dict[str, list[float | None]] = {}
    for name, pairs in values.items():
        means = average_by_key((episode.meta[PROBLEM_KEY], value) for episode, value in pairs)
        numbers[name] = [means.get(problem) for problem in range(count)]
    return numbers


def make_held_out(
    recipe: Recipe, task: EpisodicTask, open_engine: Callable[[Source], RolloutEngine], model: Any, directory: RunDirectory
) -> HeldOut:
    """The measurement of a run, with InfoSeed's if it has seeds. `open_engine` makes the engine of
    an environment, or of the recipe and its task; `model` is its policy."""
    if isinstance(task, Mixture):
        own = {name: make_held_out(part.recipe, part.task, open_engine, model, directory) for name, part in task.sources.items()}
        return HeldOutOfEach(own)
    engine = open_engine(Source(recipe, task))
    info_seed, seeds = build_info_seed(recipe.info_seed), None
    if info_seed is not None and recipe.info_seed.eval_samples:
        seeds = SeedEvaluator(
            engine,
            task,
            info_seed,
            rollout=recipe.rollout,
            model=model,
            prompts=recipe.evaluation.prompts,
            samples=recipe.info_seed.eval_samples,
            heatmaps=directory.seed_heatmaps,
        )
    return HeldOut(engine, task, recipe.evaluation, recipe.rollout, seed=recipe.seed, seeds=seeds)
