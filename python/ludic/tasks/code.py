"""Small programs: `max square over 3 [1,4,5]=25>` is answered by a function of Python, such as
`f=lambda a:max([x*x for x in a if x>3]or[0])`, which runs in a sandbox.

A problem says what to return for a list of numbers, and shows one test; five more are hidden. Of no
numbers the answer is 0: no shown test says so, one hidden test asks for it, and three of four
demonstrations forget it. The reward is 1 if all tests pass, else 0. `info["shown_passed"]` tells
whether the shown one does, as it does for most wrong programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from random import Random
from typing import ClassVar

from ludic.envs.code_exec.adapters.problem import CodingProblem, OneProblem
from ludic.envs.code_exec.calls import FunctionCallRunner
from ludic.envs.code_exec.env import CodeExecConfig, CodeExecEnv
from ludic.envs.code_exec.sandbox import SandboxPool
from ludic.envs.code_exec.shared_pool import SharedSandboxPool, share_sandboxes
from ludic.envs.code_exec.types import TestCase
from ludic.tasks.episodic import Problem, check_num_heldout, check_share
from ludic.types import StepOutcome

PICKS = ("max", "min", "first", "last")
CHANGES = {"": "x", "square": "x*x", "double": "x+x", "negate": "-x"}
COMPARISONS = {"over": ">", "under": "<", "not": "!="}
SELECTIONS = ("odd", "even", *(f"{word} {number}" for word in COMPARISONS for number in range(2, 8)))
HIDDEN = 5
_SPLIT_SEED = 20_000  # of the held-out problems, which are the same in every run


class CodeProblem(Problem):
    """A problem and its tests."""

    tests: list[tuple[list[int], int]]
    """Lists of numbers and the expected result of each; the first is shown."""


@dataclass(frozen=True)
class Wanted:
    """What a program is to do. Example: `Wanted("max", "square", "over 3")` of [1, 4, 5] is 25."""

    pick: str
    change: str
    selection: str

    def of(self, numbers: Sequence[int]) -> int:
        factor = {"double": 2, "negate": -1}.get(self.change, 1)
        selected = [number for number in numbers if _is_selected(self.selection, number)]
        changed = [number * (number if self.change == "square" else factor) for number in selected]
        if not changed:
            return 0
        return {"max": max(changed), "min": min(changed), "first": changed[0], "last": changed[-1]}[self.pick]

    @property
    def words(self) -> str:
        return " ".join(part for part in (self.pick, self.change, self.selection) if part)

    def program(self, *, of_none: bool = True) -> str:
        """A right program, or one that does not think of lists without such numbers."""
        word, _, number = self.selection.partition(" ")
        condition = f"x{COMPARISONS[word]}{number}" if number else {"odd": "x%2", "even": "x%2<1"}[word]
        numbers = f"[{CHANGES[self.change]} for x in a if {condition}]" + ("or[0]" if of_none else "")
        if self.pick in ("max", "min"):
            return f"f=lambda a:{self.pick}({numbers})"
        return f"f=lambda a:{f'({numbers})' if of_none else numbers}[{0 if self.pick == 'first' else -1}]"


def _is_selected(selection: str, number: int) -> bool:
    word, _, limit = selection.partition(" ")
    if word in ("odd", "even"):
        return number % 2 == (word == "odd")
    return {"over": number > int(limit), "under": number < int(limit), "not": number != int(limit)}[word]


class CodeEnv(CodeExecEnv):
    """One program. `info["shown_passed"]`: the test of the prompt passes. It earns nothing."""

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        outcome = await super().env_step(action)
        outcome.info["shown_passed"] = bool(outcome.info.get("passed"))  # the first failure ends the tests
        ran = outcome.info.get("cache_hit") is False
        outcome.info["program_ms"] = outcome.info["timing"]["total_run_ms"] if ran else 0.0
        return outcome


@dataclass(frozen=True)
class Code:
    """320 problems: which numbers, what of them, and which one of these."""

    right: float = 0.25
    """Share of demonstrations that are right."""
    of_none: float = 0.5
    """Share that is right but for lists without such numbers; the rest mistakes the numbers,
    too."""
    num_heldout: int = 100
    """Problems kept for evaluation, out of 320."""
    workers: int | None = None
    """Sandboxes. None means one for each processor."""
    backend: str = "auto"
    """Of the sandboxes (docs/code.md)."""
    pool: SandboxPool | None = field(default=None, repr=False, compare=False)
    """Sandboxes of your own, in Python."""

    def __post_init__(self) -> None:
        check_share("right", self.right)
        check_share("right + of_none", self.right + self.of_none)
        check_num_heldout(self.num_heldout, 160, "problems")
        shared = share_sandboxes(self.workers, self.backend) if self.pool is None else SharedSandboxPool.of(self.pool)
        object.__setattr__(self, "pool", shared)

    max_new_tokens = 56
    reward_sees = "whether the program passes the shown test and all hidden ones; nothing else of its text"
    facts: ClassVar[Mapping[str, str]] = {"shown_passed": "the test that is shown passes"}
    measures: ClassVar[Mapping[str, str]] = {"program_ms": "milliseconds that its program ran; 0 if it was judged before"}

    @property
    def execution_s(self) -> float:
        """Wall time in which programs ran."""
        assert isinstance(self.pool, SharedSandboxPool)
        return self.pool.seconds

    async def aclose(self) -> None:
        assert self.pool is not None
        await self.pool.shutdown()

    def draw(self, rng: Random) -> CodeProblem:
        return rng.choice(self._split[0])

    def heldout(self) -> Sequence[CodeProblem]:
        return self._split[1]

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        wanted, draw = Wanted(*problem["id"].split("/")), rng.random()
        if draw < self.right:
            return wanted.program()
        if draw < self.right + self.of_none:
            return wanted.program(of_none=False)
        others = [selection for selection in SELECTIONS if selection != wanted.selection]
        return Wanted(wanted.pick, wanted.change, rng.choice(others)).program(of_none=False)

    def make_env(self, problem: Problem) -> CodeEnv:
        assert self.pool is not None
        tests = [
            TestCase(f"f({numbers})", expected, id=f"{'hidden' if place else 'shown'}_{place}")
            for place, (numbers, expected) in enumerate(problem["tests"])  # type: ignore[typeddict-item]
        ]
        return CodeEnv(
            problem,
            sandbox_pool=self.pool,
            test_adapter=OneProblem(CodingProblem(problem["id"], problem["question"], tests)),
            code_runner=FunctionCallRunner(),
            config=CodeExecConfig(compile_failure_reward=0.0),
        )

    @cached_property
    def _split(self) -> tuple[list[CodeProblem], list[CodeProblem]]:
        """(training problems, held-out problems)."""
        problems = [_problem(Wanted(*parts)) for parts in product(PICKS, CHANGES, SELECTIONS)]
        Random(_SPLIT_SEED).shuffle(problems)
        return problems[self.num_heldout :], problems[: self.num_heldout]


def _problem(wanted: Wanted) -> CodeProblem:
    name = f"{wanted.pick}/{wanted.change}/{wanted.selection}"
    lists = _test_lists(wanted.selection, Random(f"tests {name}"))
    tests = [(numbers, wanted.of(numbers)) for numbers in lists]
    shown = f"[{','.join(map(str, tests[0][0]))}]={tests[0][1]}"
    return CodeProblem(id=name, question=f"{wanted.words} {shown}>", answer=wanted.program(), tests=tests)


def _test_lists(selection: str, rng: Random) -> list[list[int]]:
    """The lists of the tests, of numbers from 0 to 9. The first, which is shown, has a number that
    is selected. The last has none, so that the answer is 0, but the limit itself; the one before
    has the limit and another number.

    Example: of `over 3`, these two could be [4, 3] and [1, 3, 0].
    """
    numbers = list(range(10))
    selected = [number for number in numbers if _is_selected(selection, number)]
    others = [number for number in numbers if number not in selected]
    word, _, limit = selection.partition(" ")
    edge = int(limit) if limit else rng.choice(others)
    shown = [rng.choice(selected), *rng.choices(numbers, k=2)]
    beside = [edge - 1 if word == "under" else edge + 1 if limit else rng.choice(selected), edge]
    none = [edge, *rng.choices(others, k=2)]
    for drawn in (shown, beside, none):
        rng.shuffle(drawn)
    return [shown, rng.sample(numbers, k=10), *(rng.sample(numbers, k=6) for _ in range(HIDDEN - 3)), beside, none]
