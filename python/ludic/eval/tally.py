"""The results of an evaluation: by problem, accuracy and pass@k with intervals, and the failed
episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from ludic.errors import DataError, RolloutError
from ludic.eval.statistics import Interval, curve_points, mean_interval, pass_at_k, share_interval
from ludic.training.rollouts.episodes import EpisodeFailure
from ludic.types import Rollout

K = TypeVar("K", bound=Hashable)
PROBLEM_KEY, SAMPLE_KEY = "problem_id", "sample_index"
"""Keys of a request's meta: the problem, and the number of the answer to it."""
RolloutValue = Callable[[Rollout], float | bool | None]
"""A value to measure in addition to the reward; None if a rollout has no such value."""


@dataclass
class ProblemResult:
    """The answers to one problem."""

    problem_id: str
    rewards: list[float] = field(default_factory=list)
    """Rewards of the complete episodes."""
    right: int = 0
    """Number of right answers."""
    failed: int = 0
    """Failed episodes. They do not count as wrong answers."""

    @property
    def answers(self) -> int:
        return len(self.rewards)

    def to_dict(self) -> dict[str, Any]:
        return {"problem_id": self.problem_id, "answers": self.answers, **asdict(self)}


@dataclass(frozen=True)
class Measurement:
    """The numbers of one evaluation. Intervals are over problems, at level `confidence`."""

    problems: list[ProblemResult]
    samples_per_problem: int
    """The largest number of answers to a problem, the k of avg@k."""
    confidence: float
    accuracy: Interval
    """avg@k: the mean over problems of the share of right answers."""
    accuracy_bounds: tuple[float, float]
    """The accuracy if every failed episode were a wrong answer, and if every one were a right
    answer."""
    reward: Interval
    """The mean over problems of the mean reward."""
    pass_at_k: dict[int, Interval]
    """By k, over the problems that have k answers."""
    also: dict[str, Interval]
    """The other values, averaged in the same way."""
    shares: tuple[str, ...]
    """The names in `also` that are shares of answers, between 0 and 1."""
    num_episodes: int
    num_failed_episodes: int
    num_unanswered_problems: int
    """Problems whose episodes all failed; they are excluded from all means."""
    errors: dict[str, int]
    """Error -> number of episodes that it ended after all retries, most frequent first."""

    def metrics(self) -> dict[str, float]:
        """Flat metrics for a trainer's log."""
        flat = {"num_episodes": float(self.num_episodes), "num_failed_episodes": float(self.num_failed_episodes)}
        named = {"accuracy": self.accuracy, "reward": self.reward, **self.also}
        for name, interval in named.items():
            flat[name] = interval.value
            if interval.low is not None and interval.high is not None:
                flat[f"{name}_low"], flat[f"{name}_high"] = interval.low, interval.high
        return flat | {f"pass@{k}": interval.value for k, interval in self.pass_at_k.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything except the results by problem, as JSON values; the keys of `pass_at_k` are
        strings."""
        content = {name: value for name, value in asdict(self).items() if name != "problems"}
        return {
            "num_problems": len(self.problems),
            **content,
            "accuracy_bounds": list(self.accuracy_bounds),
            "shares": list(self.shares),
            "pass_at_k": {str(k): asdict(interval) for k, interval in self.pass_at_k.items()},
        }


def measure(
    rollouts: Sequence[Rollout],
    failures: Sequence[EpisodeFailure] = (),
    *,
    solved_at: float = 1.0,
    confidence: float = 0.95,
    select: Callable[[Rollout], bool] | None = None,
    also: Mapping[str, RolloutValue] | None = None,
) -> Measurement:
    """Measure by problem. An answer is right if its total reward is at least `solved_at`.

    The meta of rollouts and failures has the problem (`problem_id`); without it each is a problem
    of its own. If episodes have several rollouts, one for each player, `select` chooses one. Raises
    RolloutError if there is no rollout.
    """
    selected = [rollout for rollout in rollouts if select is None or select(rollout)]
    if not selected:
        raise RolloutError("no episode has a rollout; there is nothing to measure")
    episodes = Counter(rollout.meta.get("episode_idx", rollout.id) for rollout in selected)
    [(episode, count)] = episodes.most_common(1)
    if count > 1:
        raise DataError(f"episode {episode} gave {count} rollouts; choose the player to measure with select=")
    of_problem: dict[str, ProblemResult] = {}
    for rollout in selected:
        key = _get_problem_id(rollout.meta, rollout.id)
        result = of_problem.setdefault(key, ProblemResult(key))
        result.rewards.append(float(rollout.total_reward))
        result.right += rollout.total_reward >= solved_at
    for failure in failures:
        key = _get_problem_id(failure.meta, f"episode {failure.episode_idx}")
        of_problem.setdefault(key, ProblemResult(key)).failed += 1
    problems = list(of_problem.values())
    averages = {name: _average_value(selected, value_of, confidence) for name, value_of in (also or {}).items()}
    answered = [problem for problem in problems if problem.answers]
    return Measurement(
        problems=problems,
        samples_per_problem=max(problem.answers + problem.failed for problem in problems),
        confidence=confidence,
        accuracy=share_interval([p.right / p.answers for p in answered], answers=len(selected), confidence=confidence),
        accuracy_bounds=(
            sum(p.right / (p.answers + p.failed) for p in problems) / len(problems),
            sum((p.right + p.failed) / (p.answers + p.failed) for p in problems) / len(problems),
        ),
        reward=_average_reward(answered, len(selected), confidence),
        pass_at_k=_estimate_pass_curve(answered, confidence),
        also={name: average[0] for name, average in averages.items() if average is not None},
        shares=tuple(name for name, average in averages.items() if average is not None and average[1]),
        num_episodes=len(selected) + len(failures),
        num_failed_episodes=len(failures),
        num_unanswered_problems=len(problems) - len(answered),
        errors=dict(Counter(failure.error for failure in failures).most_common()),
    )


def _get_problem_id(meta: Mapping[str, Any], otherwise: str) -> str:
    return str(meta.get(PROBLEM_KEY, otherwise))


def _average_reward(answered: Sequence[ProblemResult], answers: int, confidence: float) -> Interval:
    """Rewards that are all 0 or 1 are shares; others get Student's interval."""
    means = [sum(problem.rewards) / problem.answers for problem in answered]
    if all(reward in (0, 1) for problem in answered for reward in problem.rewards):
        return share_interval(means, answers=answers, confidence=confidence)
    return mean_interval(means, confidence=confidence)


def _estimate_pass_curve(answered: Sequence[ProblemResult], confidence: float) -> dict[int, Interval]:
    """pass@k by k. After failures only problems with at least k answers count at each k;
    `num_problems` is their number."""
    curve = {}
    for k in curve_points(max(problem.answers for problem in answered)):
        complete = [problem for problem in answered if problem.answers >= k]
        estimates = [pass_at_k(problem.answers, problem.right, k) for problem in complete]
        curve[k] = share_interval(estimates, answers=sum(p.answers // k for p in complete), confidence=confidence)
    return curve


def _average_value(rollouts: Sequence[Rollout], value_of: RolloutValue, confidence: float) -> tuple[Interval, bool] | None:
    """(mean over problems, whether it is a share); None without values. Booleans are shares; other
    numbers get Student's interval."""
    measured = [(_get_problem_id(rollout.meta, rollout.id), value_of(rollout)) for rollout in rollouts]
    values = [(problem, value) for problem, value in measured if value is not None]
    if not values:
        return None
    means = list(average_by_key(values).values())
    if all(isinstance(value, bool) for _, value in values):
        return share_interval(means, answers=len(values), confidence=confidence), True
    return mean_interval(means, confidence=confidence), False


def average_by_key(values: Iterable[tuple[K, float]]) -> dict[K, float]:
    """The mean of each key's values, in order of first appearance. Example: (a, 1), (b, 0), (a, 0)
    give `{a: 0.5, b: 0}`."""
    by_key: dict[K, list[float]] = {}
    for key, value in values:
        by_key.setdefault(key, []).append(value)
    return {key: sum(numbers) / len(numbers) for key, numbers in by_key.items()}
