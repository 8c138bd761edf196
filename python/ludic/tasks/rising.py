"""Rising digits: `3>` is answered by any three digits above 3 that rise, such as `479`. Reward 1
for any of them, else 0.

The questions 0 to 4 have 84, 56, 35, 20 and 10 right answers. A policy can earn every reward with
one answer to each; the task shows whether it keeps the others. There are only five questions, which
are used for training and measurement alike: it measures the variety of the answers, not
generalisation to a new question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from random import Random
from typing import ClassVar

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.errors import ConfigError
from ludic.eval.pass_at_k import distinct_at_k, entropy_of_answers
from ludic.tasks.episodic import Played, Problem, check_share, share

DIGITS = 3
SAMPLES = (8, 32)
"""Sizes of the samples whose distinct right answers are counted."""


@cache
def right_answers(low: int) -> tuple[str, ...]:
    """All right answers, in order. `right_answers(6) == ("789",)`."""
    return tuple("".join(map(str, rising)) for rising in combinations(range(low + 1, 10), DIGITS))


def rises_above(action: str, low: str) -> bool:
    """The verifier: three digits, each above the one before, the first above `low`."""
    return action in right_answers(int(low))


@dataclass(frozen=True)
class Rising:
    """Questions `LOW>` with many right answers each."""

    right: float = 0.4
    """Share of demonstrations that are right, any right answer as likely as any other; the rest
    are three digits that are not."""
    lows: tuple[int, ...] = (0, 1, 2, 3, 4)
    """The digits that are asked about, 0 to 6."""

    def __post_init__(self) -> None:
        check_share("right", self.right)
        object.__setattr__(self, "lows", tuple(self.lows))  # a recipe has a list
        if not self.lows or len(set(self.lows)) < len(self.lows) or not all(low in range(7) for low in self.lows):
            raise ConfigError(f"lows ({list(self.lows)}) must be different digits from 0 to 6; no three digits rise above 7")

    max_new_tokens = DIGITS + 2
    reward_sees = "whether the whole answer is three rising digits above the question's, whichever they are"
    rates: ClassVar[Mapping[str, str]] = {
        **{f"distinct_of_{k}": f"distinct right answers of {k} samples, its mean" for k in SAMPLES},
        "entropy_of_right": "entropy among right answers in nats, its mean",
    }

    def draw(self, rng: Random) -> Problem:
        return _problem(rng.choice(self.lows))

    def heldout(self) -> Sequence[Problem]:
        """All questions, which are the training questions too."""
        return [_problem(low) for low in self.lows]

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        answers = right_answers(int(problem["id"]))
        if rng.random() < self.right:
            return rng.choice(answers)
        while (wrong := f"{rng.randrange(10**DIGITS):0{DIGITS}d}") in answers:
            pass
        return wrong

    def make_env(self, problem: Problem) -> DatasetQAEnv:
        return DatasetQAEnv({**problem, "answer": problem["id"]}, verifier=rises_above)

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        """The `rates`, each the mean over questions. A size of sample for which a question has too
        few answers is left out."""
        by_question: dict[str, list[str]] = {}
        for problem, rollout in played["held out"]:
            by_question.setdefault(problem["id"], []).append(rollout.steps[-1].action if rollout.total_reward > 0 else "")
        if not by_question:
            return {}
        counts = [Counter(answer for answer in answers if answer) for answers in by_question.values()]
        totals = [len(answers) for answers in by_question.values()]
        means = {
            f"distinct_of_{k}": share([distinct_at_k(count.values(), n, k) for count, n in zip(counts, totals, strict=True)])
            for k in SAMPLES
            if k <= min(totals)
        }
        return {**means, "entropy_of_right": share([entropy_of_answers(count.values()) for count in counts])}


def _problem(low: int) -> Problem:
    first, *others = right_answers(low)
    shown = f"{first}, or any of {len(others)} others" if others else first
    return Problem(id=str(low), question=f"{low}>", answer=shown)
