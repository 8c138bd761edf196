"""The closing sentences of a report. Each is printed only if the numbers support it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ludic.eval.intervals import Interval, difference_interval
from ludic.runs.held_out import Evaluation
from ludic.training.reward_scorer import SCORE_INFO


@dataclass(frozen=True)
class Change:
    """A held-out mean before and after training. Example: `Change(0.247, 0.979, Interval(0.732,
    0.71, 0.75, 500))`."""

    before: float
    after: float
    difference: Interval | None = None
    """Interval of `after - before`; None, or without bounds, if the noise is not known."""

    @property
    def rose(self) -> bool:
        """By more than its noise."""
        return self.difference is not None and self.difference.low is not None and self.difference.low > 0

    @property
    def fell(self) -> bool:
        """By more than its noise."""
        return self.difference is not None and self.difference.high is not None and self.difference.high < 0

    @property
    def noise(self) -> str:
        """The interval of the change, in words."""
        interval = self.difference
        if interval is None or interval.low is None or interval.high is None:
            return "how much of it is noise is not known"
        return f"95 % interval {interval.low:+.3f} to {interval.high:+.3f}, {interval.num_problems} problems"

    @classmethod
    def between(cls, before: Evaluation, after: Evaluation, name: str) -> Change:
        """The change of the rate `name`, over the problems that were graded in both
        measurements."""
        rates = before.rates()[name], after.rates()[name]
        pairs = zip(before.by_problem.get(name, ()), after.by_problem.get(name, ()), strict=False)
        graded = [(early, late) for early, late in pairs if early is not None and late is not None]
        if not graded:
            return cls(*rates)
        answers = min(before.num_sampled, after.num_sampled)
        return cls(*rates, difference_interval([early for early, _ in graded], [late for _, late in graded], answers=answers))


@dataclass(frozen=True)
class Facts:
    """The facts of a run that the sentences are made of."""

    requested_steps: int
    """Steps of reinforcement that the recipe asks for."""
    steps: int
    """Steps that were taken."""
    idle_steps: int = 0
    """Steps in which every answer had the weight 0, so that nothing was trained on."""
    measured: bool = True
    """The run finished and was measured at its end."""
    reward: Change | None = None
    """The held-out reward of sampled answers; None if it was not measured twice."""
    score: Change | None = None
    """The score of a reward model; None if there is none or if the reward is that score."""
    reward_is_score: bool = False
    """The reward is the score of a reward model, and there is no other measure of an answer."""
    right: tuple[float, float] | None = None
    """Share of right sampled answers, before and after; None if nothing defines a right answer."""
    clip_fraction: float | None = None
    stopped_by: str = "Early stopping"
    """What ended the run, if that was before all of its steps."""

    @property
    def stopped_early(self) -> bool:
        """Early stopping or a callback ended the run before all of its steps."""
        return self.measured and 0 < self.steps < self.requested_steps

    @property
    def idle(self) -> bool:
        """There were steps, but none of them trained on anything."""
        return 0 < self.steps == self.idle_steps


def collect_facts(
    before: Evaluation | None,
    after: Evaluation | None,
    *,
    requested_steps: int,
    steps: int,
    idle_steps: int,
    reward_is_score: bool,
    clip_fraction: float | None,
) -> Facts:
    """`before` and `after` as `make_comparable` gives them."""
    common = {"requested_steps": requested_steps, "steps": steps, "idle_steps": idle_steps, "clip_fraction": clip_fraction}
    if before is None or after is None:
        return Facts(**common, measured=after is not None)  # type: ignore[arg-type]
    scored = SCORE_INFO in before.facts and SCORE_INFO in after.facts and not reward_is_score
    shares = before.sampled_right, after.sampled_right
    return Facts(
        **common,  # type: ignore[arg-type]
        reward=Change.between(before, after, "sampled_reward"),
        score=Change.between(before, after, SCORE_INFO) if scored else None,
        reward_is_score=reward_is_score,
        right=None if None in shares else shares,  # type: ignore[arg-type]
    )


def conclude(facts: Facts) -> str:
    """The sentences on one line."""
    return " ".join(_write_sentences(facts))


def _write_sentences(facts: Facts) -> Iterator[str]:
    if not facts.measured:
        yield "The run was stopped before its end was measured."
    elif not facts.steps:
        yield "There was no reinforcement."
    if facts.stopped_early:
        yield f"{facts.stopped_by} ended the run at step {facts.steps} of {facts.requested_steps}."
    if facts.idle:
        yield (
            f"Nothing was trained on: no step of {facts.steps} had a signal. Every sampled answer had the weight 0, as it is where all "
            "answers to a problem earn the same."
        )
        return
    if facts.idle_steps:
        yield f"{facts.idle_steps} of {facts.steps} steps had no signal: every sampled answer had the weight 0."
    if facts.measured and facts.steps and facts.reward is not None:
        yield from _describe_reward(facts, facts.reward)
    if facts.clip_fraction is not None:
        yield f"The clip acted on {facts.clip_fraction:.2%} of what it saw."


def _describe_reward(facts: Facts, reward: Change) -> Iterator[str]:
    """The change of the reward, and of the score if that is something else."""
    name = "held-out score of the reward model" if facts.reward_is_score else "held-out reward of sampled answers"
    if facts.right == (1.0, 1.0):
        yield "All sampled answers to held-out problems were right before and after: on these problems there was nothing left to learn."
        return
    yield f"{_describe_change(name, reward)}."
    if facts.score is not None:
        yield f"{_describe_change('held-out score of the reward model', facts.score)}."
        if facts.score.rose and reward.fell:
            yield "The reward model is over-optimised: its score rose while the reward fell."
    elif facts.reward_is_score:
        yield "Nothing here measures whether answers with a higher score are better."
    if facts.right is not None:
        yield from _describe_right_answers(reward, *facts.right)


def _describe_change(name: str, change: Change) -> str:
    by = f"from {change.before:.3f} to {change.after:.3f}"
    if change.rose or change.fell:
        return f"The {name} {'rose' if change.rose else 'fell'} {by} ({change.noise})"
    if change.before == change.after:
        return f"The {name} did not change: {change.after:.3f}"
    if change.difference is None or change.difference.low is None:
        return f"The {name} went {by}; {change.noise}"
    return f"The {name} went {by}, which may be noise ({change.noise})"


def _describe_right_answers(reward: Change, before: float, after: float) -> Iterator[str]:
    if before == after == 0:
        yield "No sampled answer was right, before or after, so that there is little to reinforce."
    elif reward.rose and before > 0:
        yield f"{before:.1%} of the sampled answers were right before it; reinforcement selects and sharpens these."


def count_idle(lines: Sequence[dict[str, float]]) -> int:
    """The number of steps in metrics.jsonl that trained on no token. Lines that only have an
    evaluation are not counted."""
    return sum(1 for line in lines if "perf/padded_tokens" in line and not line["perf/padded_tokens"])
