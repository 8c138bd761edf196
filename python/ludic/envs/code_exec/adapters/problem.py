"""A problem of any of the data sets, as one type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.envs.code_exec.cache import hash_calls
from ludic.envs.code_exec.calls.runner import FunctionCallRunner
from ludic.envs.code_exec.calls.values import ValueVerifier
from ludic.envs.code_exec.runners import CodeRunner, StdinStdoutRunner
from ludic.envs.code_exec.types import TestCase
from ludic.errors import DataError


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


_AMOUNT = re.compile(r"\s*([0-9.]+)\s*([a-z]*)\s*")
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "milliseconds": 1e-3}
_MEGABYTES = {"": 1.0, "mb": 1.0, "mib": 1.0, "megabyte": 1.0, "megabytes": 1.0, "gb": 1024.0, "gigabytes": 1024.0, "kb": 1 / 1024,
              "kilobytes": 1 / 1024, "bytes": 2.0**-20}  # fmt: skip


def read_limits(row: Mapping[str, Any]) -> dict[str, float]:
    """`timeout_s` and `memory_limit_mb`, as a test's metadata has them, of the columns that say so.

    Example: `{"time_limit": "2.0 seconds", "memory_limit_bytes": 268435456}` gives
    `{"timeout_s": 2.0, "memory_limit_mb": 256.0}`.
    """
    limits = {}
    for name in ("timeout_s", "time_limit_s", "time_limit"):
        if (value := row.get(name)) not in (None, ""):
            limits["timeout_s"] = _amount(name, value, _SECONDS)
            break
    for name, factor in (("memory_limit_mb", 1.0), ("memory_limit_bytes", 2.0**-20), ("memory_limit", 1.0)):
        if (value := row.get(name)) not in (None, "", 0):
            limits["memory_limit_mb"] = factor * _amount(name, value, _MEGABYTES)
            break
    return limits


def _amount(name: str, value: Any, units: Mapping[str, float]) -> float:
    if isinstance(value, Mapping) and isinstance(value.get("seconds"), int):  # as CodeContests has it
        value = value["seconds"] + (value.get("nanos") or 0) * 1e-9
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    match = _AMOUNT.fullmatch(value.lower()) if isinstance(value, str) else None
    try:
        amount = float(match[1]) * units[match[2]] if match else 0.0
    except (KeyError, ValueError):
        amount = 0.0
    if amount <= 0:
        raise DataError(
            f"{name} ({value!r}) must be a number above 0, or one with its unit, such as '2 seconds' or '256 megabytes'"
        )
    return amount
