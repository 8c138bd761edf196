"""Sorting digits: the answer to `529140>` is `012459`. Reward 1 for the exact answer, else 0.

A quarter of the warm-up teacher's demonstrations are right, half are sorted in descending order,
and the rest lose a digit. Reinforcement learning therefore adds the choice of the right order and
the care not to lose digits: it selects and sharpens what the demonstrations contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.errors import ConfigError
from ludic.tasks.episodic import Problem, check_share

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
        if self.digits < 3:
            raise ConfigError(f"digits ({self.digits}) must be at least 3; with fewer there is nothing to hold out")
        if self.num_heldout is not None and not 1 <= self.num_heldout <= self._spare:
            raise ConfigError(
                f"num_heldout ({self.num_heldout}) must be between 1 and {self._spare}: each is held out with all its "
                "permutations; raise digits to hold out more"
            )
        check_share("right", self.right)
        check_share("right + backwards", self.right + self.backwards)

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
