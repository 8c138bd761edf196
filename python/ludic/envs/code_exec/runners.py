"""Runs a program against tests in a sandbox, and compares its outputs outside of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, runtime_checkable

from ludic.envs.code_exec.adapters.base import OutputVerifier
from ludic.envs.code_exec.types import (
    BatchExecutionSpec,
    BatchSandbox,
    BatchTestResult,
    CompileResult,
    CompileStatus,
    ExecutionResult,
    RunStatus,
    Sandbox,
    TestCase,
    TestResult,
    compute_hash as compute_hash,
    hash_tests as hash_tests,
)
from ludic.errors import DataError

STDERR_LINES = 5
"""Of a program that failed, in the comparison's details."""


@runtime_checkable
class CodeRunner(Protocol):
    """Judges a program by its tests."""

    async def run_tests(
        self,
        sandbox: Sandbox,
        code: str,
        tests: Sequence[TestCase],
        *,
        verifier: OutputVerifier,
        stop_on_first_failure: bool = False,
        compile_first: bool = True,
    ) -> BatchTestResult: ...


class StdinStdoutRunner:
    """Each test's `input` is the program's stdin, and its stdout is compared with `expected`.

    A sandbox with `execute_batch` gets all tests in one call, unless `use_batch_execution` is
    False; any other sandbox gets one call for each test. `metadata["timeout_s"]` and
    `metadata["memory_limit_mb"]` of a test are its own limits (in a batch, for the sandbox to
    read). Tests after the first failure have the status NOT_RUN if `stop_on_first_failure`. If a
    sandbox fails, tests without a verdict have the status SANDBOX_ERROR.
    """

    def __init__(self, default_timeout_s: float = 5.0, memory_limit_mb: int = 256, use_batch_execution: bool = True) -> None:
        self._timeout_s, self._memory_limit_mb = default_timeout_s, memory_limit_mb
        self._use_batch_execution = use_batch_execution

    async def run_tests(
        self,
        sandbox: Sandbox,
        code: str,
        tests: Sequence[TestCase],
        *,
        verifier: OutputVerifier,
        stop_on_first_failure: bool = False,
        compile_first: bool = True,
    ) -> BatchTestResult:
        for test in tests:
            limit_of(test, "timeout_s", self._timeout_s)
            limit_of(test, "memory_limit_mb", self._memory_limit_mb)
        named = _with_ids(tests, memory_limit_mb=self._memory_limit_mb)
        spec = BatchExecutionSpec(code, named, compile_first, self._timeout_s, stop_on_first_failure)
        if self._use_batch_execution and isinstance(sandbox, BatchSandbox) and tests:
            results = await self._run_batch(sandbox, spec, verifier)
        else:
            results = await self._run_each(sandbox, spec, verifier)
        verdicts = [replace(verdict, test_case=test) for test, verdict in zip(tests, results, strict=True)]
        return BatchTestResult(verdicts, compute_hash(code), hash_tests(tests))

    async def _run_batch(self, sandbox: BatchSandbox, spec: BatchExecutionSpec, verifier: OutputVerifier) -> list[TestResult]:
        """The answers are matched by id, so a sandbox may answer in any order."""
        by_id = {test.id: test for test in spec.tests}
        seen: dict[str, TestResult] = {}
        compiled, finished, failure = CompileResult(CompileStatus.SUCCESS), False, None
        try:
            async with aclosing(sandbox.execute_batch(spec)) as answers:
                async for answer in answers:
                    if isinstance(answer, CompileResult):
                        compiled = answer
                        if not compiled.success:
                            return [not_compiled(test, compiled) for test in spec.tests]
                    elif isinstance(answer, ExecutionResult):
                        if (test := by_id.get(answer.cache_key or "")) is not None:
                            seen[test.id] = judge(test, answer, verifier)
                            if spec.stop_on_first_failure and not seen[test.id].passed:
                                finished = True
                                break
                    elif answer.get("type") == "done":
                        finished = True
        except Exception as error:
            failure = error
        stopped = spec.stop_on_first_failure and any(not result.passed for result in seen.values())
        unseen = not_run if finished and stopped else lambda test, result: crashed(test, result, failure)
        return [seen.get(test.id) or unseen(test, compiled) for test in spec.tests]

    async def _run_each(self, sandbox: Sandbox, spec: BatchExecutionSpec, verifier: OutputVerifier) -> list[TestResult]:
        compiled = CompileResult(CompileStatus.SUCCESS)
        if spec.compile_first:
            try:
                compiled = await sandbox.compile(spec.code, timeout_s=spec.timeout_s)
            except Exception as error:
                return [crashed(test, compiled, error) for test in spec.tests]
            if not compiled.success:
                return [not_compiled(test, compiled) for test in spec.tests]

        async def run(test: TestCase) -> TestResult:
            try:
                execution = await sandbox.execute(
                    spec.code,
                    stdin=str(test.input),
                    skip_compile=spec.compile_first,
                    timeout_s=limit_of(test, "timeout_s", spec.timeout_s),
                    memory_limit_mb=int(limit_of(test, "memory_limit_mb", self._memory_limit_mb)),
                )
            except Exception as error:
                return crashed(test, CompileResult(CompileStatus.SUCCESS), error)
            return judge(test, execution, verifier)

        if not spec.stop_on_first_failure:
            return list(await asyncio.gather(*map(run, spec.tests)))
        results: list[TestResult] = []
        for test in spec.tests:
            failed = any(not result.passed for result in results)
            results.append(not_run(test, compiled) if failed else await run(test))
        return results


def judge(test: TestCase, execution: ExecutionResult, verifier: OutputVerifier) -> TestResult:
    """The verdict on one run: it passes if the program ended with status 0 and printed the expected
    output."""
    if not execution.compiled:
        return TestResult(test, False, None, execution, _compile_details(execution.compile_result))
    if execution.run_status is RunStatus.SUCCESS:
        passed, details = verifier.verify(execution.stdout, test.expected)
        return TestResult(test, passed, execution.stdout, execution, details)
    return TestResult(test, False, execution.stdout, execution, _failure_details(execution))


def _failure_details(execution: ExecutionResult) -> str:
    if execution.run_status is RunStatus.TIMEOUT:
        return f"The program timed out after {execution.run_duration_ms:.0f} ms"
    if execution.run_status is RunStatus.MEMORY_EXCEEDED:
        return "Memory limit exceeded"
    if execution.run_status is RunStatus.SANDBOX_ERROR:
        return f"Sandbox crashed: {execution.stderr}".rstrip(": ")
    if execution.run_status is RunStatus.KILLED:
        return f"The program was killed (exit status {execution.exit_code})"
    lines = "\n".join(execution.stderr.strip().splitlines()[:STDERR_LINES])
    return f"Runtime error (exit status {execution.exit_code})" + (f":\n{lines}" if lines else "")


def _compile_details(compiled: CompileResult) -> str:
    place = f" (line {compiled.error_line})" if compiled.error_line is not None else ""
    return f"Compilation failed: {compiled.error_message or compiled.status.value}{place}"


def not_compiled(test: TestCase, compiled: CompileResult) -> TestResult:
    execution = ExecutionResult(
        compiled, RunStatus.NOT_RUN, compile_duration_ms=compiled.duration_ms, total_duration_ms=compiled.duration_ms
    )
    return TestResult(test, False, None, execution, _compile_details(compiled))


def not_run(test: TestCase, compiled: CompileResult) -> TestResult:
    return TestResult(test, False, None, ExecutionResult(compiled, RunStatus.NOT_RUN), "Not run: an earlier test failed")


def crashed(test: TestCase, compiled: CompileResult, error: Exception | None) -> TestResult:
    reason = "" if error is None else f"{type(error).__name__}: {error}"
    execution = ExecutionResult(compiled, RunStatus.SANDBOX_ERROR, stderr=reason)
    return TestResult(test, False, None, execution, f"Sandbox crashed: {reason}" if reason else "Sandbox crashed")


def limit_of(test: TestCase, name: str, default: float) -> float:
    """The test's own limit, or the default. DataError unless it is a finite number above 0, and at
    least 1 for megabytes."""
    limit = test.metadata.get(name, default)
    least = 1 if name == "memory_limit_mb" else 0
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not (least <= limit < math.inf and limit > 0):
        raise DataError(f"metadata[{name!r}] of test {test.id!r} is {limit!r}, not a finite number {'>= 1' if least else '> 0'}")
    return limit


def _with_ids(tests: Sequence[TestCase], memory_limit_mb: int) -> list[TestCase]:
    """The tests with ids that differ, because answers are matched by id, and each with its memory
    limit.

    Example: ids "", "a", "a" become "#0", "a", "a#2".
    """
    taken: set[str] = set()
    named = []
    for place, test in enumerate(tests):
        name = test.id if test.id and test.id not in taken else f"{test.id}#{place}"
        while name in taken:
            name += "#"
        taken.add(name)
        metadata = {"memory_limit_mb": memory_limit_mb, **test.metadata}
        named.append(TestCase(test.input, test.expected, name, test.weight, metadata))
    return named
