"""Reads problems of any of the data sets that are known, by their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ludic.envs.code_exec.adapters.call_rows import read_call_tests
from ludic.envs.code_exec.adapters.problem import CodingProblem, read_limits, read_stdin_tests
from ludic.envs.code_exec.cache import hash_calls
from ludic.envs.code_exec.types import TestCase
from ludic.errors import DataError, DataKeyError

PROMPT_COLUMNS = ("question", "prompt", "problem", "description", "question_content", "text", "instruction")
ID_COLUMNS = ("problem_id", "task_id", "question_id", "id", "name")


def read_problem(row: Mapping[str, Any], *, prompt_column: str | None = None) -> CodingProblem:
    """The problem of a row of APPS, TACO, CodeContests, LiveCodeBench, MBPP, HumanEval, or with
    columns of your own (docs/code.md has them). DataError, with the reason, for a row without
    tests, or with tests that cannot be judged outside the sandbox."""
    name = str(next((row[key] for key in ID_COLUMNS if row.get(key) is not None), "unknown"))
    columns = PROMPT_COLUMNS if prompt_column is None else (prompt_column,)
    prompt = next((str(row[key]) for key in columns if row.get(key)), None)
    if prompt is None:
        raise DataKeyError(f"the problem has no {' or '.join(map(repr, columns))}; it has {sorted(row)}")
    problem = read_call_tests(row, CodingProblem(name, prompt, ()))
    if problem is None:
        problem = CodingProblem(name, prompt, read_stdin_tests(row))
    if not problem.tests:
        raise DataError(f"problem {name} has no tests; it has the columns {', '.join(sorted(row))}")
    limits = read_limits(row)
    tests = [replace(test, metadata={**limits, **test.metadata}) for test in problem.tests]
    return replace(problem, tests=tests, solutions=_solutions(row))


def _solutions(row: Mapping[str, Any]) -> Sequence[str]:
    """Right programs, if the row has any."""
    found = next((row[key] for key in ("solutions", "canonical_solution", "code") if row.get(key)), ())
    return (found,) if isinstance(found, str) else tuple(map(str, found)) if isinstance(found, list) else ()


class CodingProblemAdapter:
    """The TestAdapter of all these data sets. `FunctionCallRunner` or `StdinStdoutRunner`:
    `read_problem(row).make_runner(...)`."""

    def __init__(self, *, prompt_column: str | None = None) -> None:
        self._prompt_column = prompt_column

    def get_tests(self, sample: Mapping[str, Any]) -> list[TestCase]:
        return list(self._read(sample).tests)

    def get_prompt(self, sample: Mapping[str, Any]) -> str:
        return self._read(sample).prompt

    def get_problem_id(self, sample: Mapping[str, Any]) -> str:
        return self._read(sample).id

    def hash_tests(self, tests: Sequence[TestCase]) -> str:
        return hash_calls(tests)

    def get_reference_solution(self, sample: Mapping[str, Any]) -> str | None:
        return next(iter(self._read(sample).solutions), None)

    def _read(self, sample: Mapping[str, Any]) -> CodingProblem:
        return read_problem(sample, prompt_column=self._prompt_column)
