"""A problem of any of the data sets, as one type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.envs.code_exec.calls.runner import FunctionCallRunner
from ludic.envs.code_exec.calls.values import ValueVerifier
from ludic.envs.code_exec.hashing import hash_calls
from ludic.envs.code_exec.runners import CodeRunner, StdinStdoutRunner
from ludic.envs.code_exec.types import TestCase


@dataclass(frozen=True)
class CodingProblem:
    """One problem. Example: `CodingProblem("7", "Double it.", [TestCase("2", "4", id="test_0")])`
    is what `{"id": 7, "question": "Double it.", "inputs": ["2"], "outputs": ["4"]}` says."""

    id: str
    prompt: str
    tests: Sequence[TestCase]
    calls: bool = False
    """Each test is the call of a function, not a run of the whole program."""
    before: str = ""
    """Python that runs before the program, such as imports. With `calls` only."""
    after: str = ""
    """Python that runs after the program and before the calls, such as objects of its classes."""
    tuples_are_lists: bool = False
    """What is expected is from JSON, which has lists alone."""
    solutions: Sequence[str] = field(default=(), repr=False)

    def make_runner(self, timeout_s: float, memory_limit_mb: int) -> CodeRunner:
        """The runner for its tests, with the limits of tests that have none."""
        if not self.calls:
            return StdinStdoutRunner(timeout_s, memory_limit_mb)
        verifier = ValueVerifier(tuples_are_lists=self.tuples_are_lists)
        return FunctionCallRunner(timeout_s, memory_limit_mb, before=self.before, after=self.after, verifier=verifier)


class OneProblem:
    """The TestAdapter of a problem that is read already, for any sample."""

    def __init__(self, problem: CodingProblem) -> None:
        self._problem = problem

    def get_tests(self, sample: Mapping[str, Any]) -> list[TestCase]:
        return list(self._problem.tests)

    def get_prompt(self, sample: Mapping[str, Any]) -> str:
        return self._problem.prompt

    def get_problem_id(self, sample: Mapping[str, Any]) -> str:
        return self._problem.id

    def hash_tests(self, tests: Sequence[TestCase]) -> str:
        return hash_calls(tests)
