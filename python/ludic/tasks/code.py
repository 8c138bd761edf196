"""Tasks whose answers are programs, which run in sandboxes.

`CodeData` has the problems of a data set with tests: the user's own, or a public one. `Code` makes
small ones: `max square over 3 [1,4,5]=25>` is answered by a function of Python, such as
`f=lambda a:max([x*x for x in a if x>3]or[0])`.

A problem of `Code` says what to return for a list of numbers, and shows one test; five more are
hidden. Of no numbers the answer is 0: no shown test says so, one hidden test asks for it, and three
of four demonstrations forget it. The reward is 1 if all tests pass, else 0. `info["shown_passed"]`
tells whether the shown one does, as it does for most wrong programs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from random import Random
from typing import ClassVar

from ludic.data.sources import read_table
from ludic.envs.code_exec.adapters.base import APPS_SYSTEM_PROMPT
from ludic.envs.code_exec.adapters.problem import CodingProblem, OneProblem, read_problem
from ludic.envs.code_exec.calls import FunctionCallRunner
from ludic.envs.code_exec.env import CodeExecConfig, CodeExecEnv
from ludic.envs.code_exec.shared_pool import SharedSandboxPool, share_sandboxes
from ludic.envs.code_exec.types import SandboxPool, TestCase
from ludic.errors import ConfigError, DataError, check_value
from ludic.parsers import extract_last_code_block
from ludic.tasks.data_task import TaskData, hash_text
from ludic.tasks.episodic import Problem, ProblemList
from ludic.types import StepOutcome

logger = logging.getLogger(__name__)

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


class RunsPrograms:
    """A task whose answers are programs, which run in sandboxes."""

    measures: ClassVar[Mapping[str, str]] = {"program_ms": "milliseconds that its program ran; 0 if it was judged before"}
    _sandboxes: SharedSandboxPool

    @property
    def execution_s(self) -> float:
        """Wall time in which programs ran."""
        return self._sandboxes.seconds

    async def aclose(self) -> None:
        await self._sandboxes.shutdown()


class CodeEnv(CodeExecEnv):
    """One program. `info["shown_passed"]`: the test of the prompt passes. It earns nothing."""

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        outcome = await super().env_step(action)
        outcome.info["shown_passed"] = bool(outcome.info.get("passed"))  # the first failure ends the tests
        ran = outcome.info.get("cache_hit") is False
        outcome.info["program_ms"] = outcome.info["timing"]["total_run_ms"] if ran else 0.0
        return outcome


@dataclass(frozen=True)
class Code(RunsPrograms):
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
        check_value("right", self.right, least=0, most=1)
        check_value("right + of_none", self.right + self.of_none, least=0, most=1)
        check_value("num_heldout", self.num_heldout, "the rest is for training", least=1, most=160)
        shared = share_sandboxes(self.workers, self.backend) if self.pool is None else SharedSandboxPool.of(self.pool)
        object.__setattr__(self, "_sandboxes", shared)

    max_new_tokens = 56
    reward_sees = "whether the program passes the shown test and all hidden ones; nothing else of its text"
    facts: ClassVar[Mapping[str, str]] = {"shown_passed": "the test that is shown passes"}

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
        tests = [
            TestCase(f"f({numbers})", expected, id=f"{'hidden' if place else 'shown'}_{place}")
            for place, (numbers, expected) in enumerate(problem["tests"])  # type: ignore[typeddict-item]
        ]
        return CodeEnv(
            problem,
            sandbox_pool=self._sandboxes,
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


CODE_SYSTEM_PROMPT = (
    "You solve programming problems in Python. If a problem names a function, define it; else your program reads its input from "
    "stdin and prints its answer to stdout. Think first, then write the whole program in one ```python block, which must be the "
    "last one of your answer."
)
SHOWN_REFUSALS = 3


class CodeDataEnv(CodeExecEnv):
    """One answer, whose last fenced block is the program. `info["compiled"]`: it is valid."""

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        outcome = await super().env_step(extract_last_code_block(action) or "")
        info = outcome.info
        info["compiled"] = info.get("compile_failed") is False
        info["program_ms"] = info["timing"]["total_run_ms"] if info.get("cache_hit") is False else 0.0
        return outcome


class CodeData(RunsPrograms, ProblemList):
    """The problems of a data set whose columns `read_problem` knows. The reward is 1 if all tests
    pass, else 0; with `partial_credit` the share that passes. An answer without a program earns 0.

    Problems whose tests cannot be judged are left out, and logged with the reason.
    """

    success_reward = 1.0
    facts: ClassVar[Mapping[str, str]] = {"compiled": "the answer has a valid program"}
    rates = facts

    def __init__(
        self,
        data: TaskData | str | None = None,
        *,
        partial_credit: bool = False,
        max_new_tokens: int = 1024,
        timeout_per_test_s: float = 5.0,
        memory_limit_mb: int = 256,
        max_tests: int | None = None,
        workers: int | None = None,
        backend: str = "auto",
        pool: SandboxPool | None = None,
    ) -> None:
        """Limits apply to tests for which the data set has none. `workers` sandboxes of `backend`
        (docs/code.md). None means one for each processor. `pool`: sandboxes of your own, in
        Python."""
        rows = TaskData.of(data)
        if not isinstance(rows.source, str):
            raise ConfigError(f"data ({rows.source!r}) must be one file, folder or hub id, whose rows have tests")
        if rows.streaming:
            raise ConfigError("streaming=true is for prompts with reward functions; the tests of programs are read into memory")
        self.max_new_tokens = max_new_tokens
        self._settings = CodeExecConfig(
            timeout_per_test_s=timeout_per_test_s,
            memory_limit_mb=memory_limit_mb,
            max_tests=max_tests,
            partial_credit=partial_credit,
            compile_failure_reward=0.0,
        )
        self._problems: dict[str, CodingProblem] = {}
        """By the ids of this task."""

        def read(source: str, split: str, prefix: str) -> list[Problem]:
            return self._read(rows, source, split, prefix)

        problems, self.training, self._heldout = rows.divide(read, key=lambda problem: hash_text(problem["question"]))
        content = [self._problems[problem["id"]] for problem in problems]
        self.digest = hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self._sandboxes = share_sandboxes(workers, backend) if pool is None else SharedSandboxPool.of(pool)

    @property
    def reward_sees(self) -> str:
        return f"{'how many' if self._settings.partial_credit else 'whether all'} tests of the problem pass"

    @property
    def system_prompt(self) -> str:
        """Suggested for recipes without one."""
        return CODE_SYSTEM_PROMPT if any(problem.calls for problem in self._problems.values()) else APPS_SYSTEM_PROMPT

    def heldout(self) -> Sequence[Problem]:
        return self._heldout

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        """A right program of the row, in a fenced block."""
        solutions = self._problems[problem["id"]].solutions
        if not solutions:
            raise ConfigError(f"problem {problem['id']} has no `solutions` for a warm-up; disable it with warmup.steps=0")
        return f"```python\n{rng.choice(solutions).strip()}\n```"

    def make_env(self, problem: Problem) -> CodeDataEnv:
        known = self._problems[problem["id"]]
        return CodeDataEnv(
            problem,
            sandbox_pool=self._sandboxes,
            test_adapter=OneProblem(known),
            code_runner=known.make_runner(self._settings.timeout_per_test_s, self._settings.memory_limit_mb),
            config=self._settings,
        )

    def _read(self, rows: TaskData, source: str, split: str, prefix: str) -> list[Problem]:
        table = read_table(source, config=rows.config, split=split)
        problems, refusals = [], []
        for index, row in enumerate(table.rows):
            try:
                known = read_problem(row, prompt_column=rows.prompt_column)
            except DataError as error:
                refusals.append(f"{table.where(index)}: {error}")
                continue
            name = f"{prefix}{index}"
            self._problems[name] = known
            answer = next(iter(known.solutions), "")
            problems.append(Problem(id=name, question=known.prompt, answer=answer))
        shown = "; ".join(refusals[:SHOWN_REFUSALS])
        if not problems:
            raise DataError(f"{source} has no problem that can be judged. {shown}")
        if refusals:
            logger.warning("%d of %d problems of %s are left out: %s", len(refusals), len(table.rows), source, shown)
        return problems
