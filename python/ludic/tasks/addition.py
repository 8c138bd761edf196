"""Scratchpad addition: the answer to `47+38=` is `7+8=15,4+3+1=8>85`, one column after the other,
then `>` and the sum.

Every problem carries from its units; the teacher forgets the carry (`7+8=15,4+3=7>75`) in three of
four demonstrations. The reward depends on the sum only, never on the scratchpad;
`info["scratchpad_right"]` tells whether the scratchpad was right as well. The two can differ: a
model may be right for the wrong reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from random import Random
from typing import ClassVar

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.tasks.episodic import Problem, check_num_heldout, check_share
from ludic.types import StepOutcome

_SPLIT_SEED = 20_000  # of the held-out problems, which are the same in every run


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
        check_share("right", self.right)
        check_num_heldout(self.num_heldout, 1_800, "problems")

    max_new_tokens = 24
    reward_sees = "the sum after the last '>', in an answer that ended; never the scratchpad"
    facts: ClassVar[Mapping[str, str]] = {"scratchpad_right": "the whole scratchpad is the textbook's"}

    def draw(self, rng: Random) -> Problem:
        return _problem(*rng.choice(self._split[0]))

    def heldout(self) -> Sequence[Problem]:
        return [_problem(a, b) for a, b in self._split[1]]

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


def _problem(a: int, b: int) -> Problem:
    return Problem(id=f"{a}+{b}", question=f"{a}+{b}=", answer=str(a + b))
