"""Tasks of digits, learnt on a CPU in a minute or two: sorting, scratchpad addition, rising digits.

Sorting: the answer to `529140>` is `012459`. Reward 1 for the exact answer, else 0. A quarter of
the warm-up teacher's demonstrations are right, half are sorted in descending order, and the rest
lose a digit. Reinforcement learning therefore adds the choice of the right order and the care not
to lose digits: it selects and sharpens what the demonstrations contain.

Addition: the answer to `47+38=` is `7+8=15,4+3+1=8>85`, one column after the other, then `>` and
the sum. Every problem carries from its units; the teacher forgets the carry (`7+8=15,4+3=7>75`) in
three of four demonstrations. The reward depends on the sum only, never on the scratchpad;
`info["scratchpad_right"]` tells whether the scratchpad was right as well. The two can differ: a
model may be right for the wrong reasons.

Rising digits: `3>` is answered by any three digits above 3 that rise, such as `479`. Reward 1 for
any of them, else 0. The questions 0 to 4 have 84, 56, 35, 20 and 10 right answers. A policy can
earn every reward with one answer to each; the task shows whether it keeps the others. There are
only five questions, which are used for training and measurement alike: it measures the variety of
the answers, not generalisation to a new question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, product
from random import Random
from typing import ClassVar

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.errors import ConfigError, check_value
from ludic.eval.statistics import distinct_at_k, entropy_of_answers
from ludic.tasks.episodic import Played, Problem, share
from ludic.types import StepOutcome

_SPLIT_SEED = 20_000  # of the held-out problems, which are the same in every run


def matches_exactly(action: str, target: str) -> bool:
    """The verifier: exact equality, white space included."""
    return action == target


@dataclass(frozen=True)
class DigitSort:
    """Problems are held out with all permutations of their digits: no held-out answer occurs in
    training."""

    digits: int = 6
    """Number of digits of a problem."""
    right: float = 0.25
    """Share of demonstrations that are right."""
    backwards: float = 0.5
    """Share in descending order; the rest lose one digit of the right answer."""
    num_heldout: int | None = None
    """Problems kept for evaluation. None means 500, or fewer for few digits."""

    def __post_init__(self) -> None:
        check_value("digits", self.digits, "with fewer there is nothing to hold out", least=3)
        check_value("num_heldout", self.num_heldout, "raise digits for more", least=1, most=self._spare, optional=True)
        check_value("right", self.right, least=0, most=1)
        check_value("right + backwards", self.right + self.backwards, least=0, most=1)

    reward_sees = "the whole answer, which must be exact and ended"

    @property
    def max_new_tokens(self) -> int:
        return self.digits + 2

    def draw(self, rng: Random) -> Problem:
        while True:
            problem = self._any_problem(rng)
            if problem["answer"] not in self._heldout_answers:
                return problem

    def heldout(self) -> Sequence[Problem]:
        return self._heldout

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        answer, draw = problem["answer"], rng.random()
        if draw < self.right:
            return answer
        if draw < self.right + self.backwards:
            return answer[::-1]
        lost = rng.randrange(self.digits)
        return answer[:lost] + answer[lost + 1 :]

    def make_env(self, problem: Problem) -> DatasetQAEnv:
        return DatasetQAEnv(dict(problem), verifier=matches_exactly)

    @property
    def _spare(self) -> int:
        """The maximum of held-out problems: one in 500, which with their permutations is less
        than half of all problems."""
        return 10**self.digits // 500

    def _any_problem(self, rng: Random) -> Problem:
        digits = f"{rng.randrange(10**self.digits):0{self.digits}d}"
        return Problem(id=digits, question=f"{digits}>", answer="".join(sorted(digits)))

    @cached_property
    def _heldout(self) -> tuple[Problem, ...]:
        rng, problems = Random(_SPLIT_SEED), dict[str, Problem]()
        count = min(500, self._spare) if self.num_heldout is None else self.num_heldout
        while len(problems) < count:
            problem = self._any_problem(rng)
            problems.setdefault(problem["id"], problem)
        return tuple(problems.values())

    @cached_property
    def _heldout_answers(self) -> frozenset[str]:
        return frozenset(problem["answer"] for problem in self._heldout)


def textbook(a: int, b: int) -> str:
    """The right answer, for units whose sum is at least 10. `textbook(47, 38) ==
    "7+8=15,4+3+1=8>85"`."""
    return f"{a % 10}+{b % 10}={a % 10 + b % 10},{a // 10}+{b // 10}+1={a // 10 + b // 10 + 1}>{a + b}"


def without_carry(a: int, b: int) -> str:
    """The teacher's mistake. `without_carry(47, 38) == "7+8=15,4+3=7>75"`."""
    tens = a // 10 + b // 10
    return f"{a % 10}+{b % 10}={a % 10 + b % 10},{a // 10}+{b // 10}={tens}>{10 * tens + (a + b) % 10}"


def sum_matches(action: str, target: str) -> bool:
    """The verifier: the text after the last `>` is the right sum. Without `>` there is no
    answer."""
    _, mark, answer = action.rpartition(">")
    return mark == ">" and answer == target


class AdditionEnv(DatasetQAEnv):
    """One sum. `info["scratchpad_right"]`: the whole answer equals the textbook's. It earns
    nothing."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(dict(problem), verifier=sum_matches)
        a, b = problem["question"].rstrip("=").split("+")
        self._textbook = textbook(int(a), int(b))

    def env_step(self, action: str) -> StepOutcome:
        outcome = super().env_step(action)
        outcome.info["scratchpad_right"] = action == self._textbook
        return outcome


@dataclass(frozen=True)
class Addition:
    """Two numbers of two digits with a carry from the units: 3,645 ordered pairs. A pair is held
    out in both orders."""

    right: float = 0.25
    """Share of demonstrations with the carry."""
    num_heldout: int = 500
    """Problems kept for evaluation, out of 3,645."""

    def __post_init__(self) -> None:
        check_value("right", self.right, least=0, most=1)
        check_value("num_heldout", self.num_heldout, "the rest is for training", least=1, most=1_800)

    max_new_tokens = 24
    reward_sees = "the sum after the last '>', in an answer that ended; never the scratchpad"
    facts: ClassVar[Mapping[str, str]] = {"scratchpad_right": "the whole scratchpad is the textbook's"}

    def draw(self, rng: Random) -> Problem:
        return _sum_problem(*rng.choice(self._split[0]))

    def heldout(self) -> Sequence[Problem]:
        return [_sum_problem(a, b) for a, b in self._split[1]]

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        a, b = (int(number) for number in problem["question"].rstrip("=").split("+"))
        return textbook(a, b) if rng.random() < self.right else without_carry(a, b)

    def make_env(self, problem: Problem) -> DatasetQAEnv:
        return AdditionEnv(problem)

    @cached_property
    def _split(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(training pairs, held-out pairs). A held-out pair is followed by its mirror image, except
        perhaps the last."""
        unordered = [(a, b) for a, b in product(range(10, 100), repeat=2) if a <= b and a % 10 + b % 10 >= 10]
        Random(_SPLIT_SEED).shuffle(unordered)
        ordered = [pair for a, b in unordered for pair in dict.fromkeys([(a, b), (b, a)])]
        heldout = ordered[: self.num_heldout]
        seen = {frozenset(pair) for pair in heldout}
        return [pair for pair in ordered if frozenset(pair) not in seen], heldout


def _sum_problem(a: int, b: int) -> Problem:
    return Problem(id=f"{a}+{b}", question=f"{a}+{b}=", answer=str(a + b))


RISING_DIGITS = 3
RISING_SAMPLES = (8, 32)
"""Sizes of the samples whose distinct right answers are counted."""


@cache
def right_answers(low: int) -> tuple[str, ...]:
    """All right answers, in order. `right_answers(6) == ("789",)`."""
    return tuple("".join(map(str, rising)) for rising in combinations(range(low + 1, 10), RISING_DIGITS))


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
        check_value("right", self.right, least=0, most=1)
        object.__setattr__(self, "lows", tuple(self.lows))  # a recipe has a list
        if not self.lows or len(set(self.lows)) < len(self.lows) or not all(low in range(7) for low in self.lows):
            raise ConfigError(f"lows ({list(self.lows)}) must be different digits from 0 to 6; no three digits rise above 7")

    max_new_tokens = RISING_DIGITS + 2
    reward_sees = "whether the whole answer is three rising digits above the question's, whichever they are"
    rates: ClassVar[Mapping[str, str]] = {
        **{f"distinct_of_{k}": f"distinct right answers of {k} samples, its mean" for k in RISING_SAMPLES},
        "entropy_of_right": "entropy among right answers in nats, its mean",
    }

    def draw(self, rng: Random) -> Problem:
        return _rising_problem(rng.choice(self.lows))

    def heldout(self) -> Sequence[Problem]:
        """All questions, which are the training questions too."""
        return [_rising_problem(low) for low in self.lows]

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        answers = right_answers(int(problem["id"]))
        if rng.random() < self.right:
            return rng.choice(answers)
        while (wrong := f"{rng.randrange(10**RISING_DIGITS):0{RISING_DIGITS}d}") in answers:
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
            for k in RISING_SAMPLES
            if k <= min(totals)
        }
        return {**means, "entropy_of_right": share([entropy_of_answers(count.values()) for count in counts])}


def _rising_problem(low: int) -> Problem:
    first, *others = right_answers(low)
    shown = f"{first}, or any of {len(others)} others" if others else first
    return Problem(id=str(low), question=f"{low}>", answer=shown)
