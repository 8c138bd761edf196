"""Judges programs by the values of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.adapters.base import OutputVerifier
from ludic.envs.code_exec.cache import compute_hash, hash_calls
from ludic.envs.code_exec.calls.values import ValueVerifier
from ludic.envs.code_exec.runners import STDERR_LINES, crashed, judge, limit_of, not_compiled, not_run
from ludic.envs.code_exec.sandbox import Sandbox
from ludic.envs.code_exec.types import (
    BatchTestResult,
    CompileResult,
    CompileStatus,
    ExecutionResult,
    RunStatus,
    TestCase,
    TestResult,
)

VALID = CompileResult(CompileStatus.SUCCESS)
NO_ANSWERS = "The program wrote something else to where the values of its calls are written"


@cache
def _before_program() -> str:
    return Path(__file__).with_name("in_program.py").read_text(encoding="utf-8")


class FunctionCallRunner:
    """Each test's `input` is an expression, such as `f([3, 8])`, which is evaluated in the sandbox
    after the program; its value is compared outside with `expected`.

    All calls of a program are made in one process, one after another, as a file of asserts does. If
    a call ends the process or takes too long, the calls after it are made in a new one. A call has
    no verdict but its own: it fails if it raises, or if it was the first of its process and gave no
    value. `before` and `after` are texts that run before and after the program.
    """

    def __init__(
        self,
        default_timeout_s: float = 5.0,
        memory_limit_mb: int = 256,
        *,
        before: str = "",
        after: str = "",
        verifier: OutputVerifier | None = None,
    ) -> None:
        self._timeout_s, self._memory_limit_mb = default_timeout_s, memory_limit_mb
        self._before, self._after = before, after
        self.default_verifier: OutputVerifier = verifier or ValueVerifier()
        """For environments that are given none."""

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
        results: list[TestResult] = []
        source = f"{_before_program()}\n\nmain({code!r}, {self._before!r}, {self._after!r})\n"
        while len(results) < len(tests):
            rest = tests[len(results) :]
            try:
                execution = await sandbox.execute(
                    source,
                    stdin=json.dumps([str(test.input) for test in rest]),
                    skip_compile=True,
                    timeout_s=limit_of(rest[0], "timeout_s", self._timeout_s),
                    memory_limit_mb=int(limit_of(rest[0], "memory_limit_mb", self._memory_limit_mb)),
                )
            except Exception as error:
                results += [crashed(test, VALID, f": {type(error).__name__}: {error}") for test in rest]
                break
            results += _judge_all(rest, execution, verifier)
            if (
                stop_on_first_failure
                and (failed := next((i for i, one in enumerate(results) if not one.passed), None)) is not None
            ):
                compiled = results[failed].execution.compile_result
                results = results[: failed + 1] + [not_run(test, compiled) for test in tests[failed + 1 :]]
        return BatchTestResult(results, compute_hash(code), hash_calls(tests))


def _judge_all(tests: Sequence[TestCase], execution: ExecutionResult, verifier: OutputVerifier) -> list[TestResult]:
    """The verdicts on the first tests, at least one: those that the process has answered, or that
    it ended with."""
    answers = _read_answers(execution.stdout, len(tests))
    if answers is None:
        return [TestResult(test, False, None, execution, NO_ANSWERS) for test in tests]
    if answers and "syntax_error" in answers[0]:
        compiled = _syntax_error(answers[0]["syntax_error"])
        return [not_compiled(test, compiled) for test in tests]
    if not answers:
        if execution.run_status is RunStatus.SUCCESS:
            return [TestResult(tests[0], False, None, execution, "The program ended before it returned a value")]
        return [judge(tests[0], execution, verifier)]
    share = len(answers)
    return [_verdict(test, answer, execution, share, verifier) for test, answer in zip(tests, answers, strict=False)]


def _verdict(
    test: TestCase, answer: Mapping[str, Any], execution: ExecutionResult, share: int, verifier: OutputVerifier
) -> TestResult:
    """On one call of `share` that were made in the same time."""
    duration_ms = execution.run_duration_ms / share
    raised = "raised" in answer
    own = ExecutionResult(
        VALID,
        RunStatus.RUNTIME_ERROR if raised else RunStatus.SUCCESS,
        stderr="\n".join(execution.stderr.splitlines()[-STDERR_LINES:]),
        exit_code=execution.exit_code,
        return_value=answer.get("value"),
        run_duration_ms=duration_ms,
        total_duration_ms=duration_ms,
        peak_memory_bytes=execution.peak_memory_bytes,
    )
    if raised:
        return TestResult(test, False, None, own, f"Raised {str(answer['raised'])[:500]}")
    passed, details = verifier.verify(answer["value"], test.expected)
    return TestResult(test, passed, answer["value"], own, details)


def _read_answers(stdout: str, most: int) -> list[dict[str, Any]] | None:
    """The answers of the calls, one a line; None if it is anything else. A line that was cut off is
    no answer.

    Example: `{"value": 1}`, a newline, `{"val` gives `[{"value": 1}]`.
    """
    lines = stdout.split("\n")[:-1]
    if len(lines) > most:
        return None
    try:
        answers = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return None
    known = (["value"], ["raised"], ["syntax_error"])
    right = all(isinstance(one, dict) and list(one) in known[: 3 if len(lines) == 1 else 2] for one in answers)
    return answers if right else None


def _syntax_error(error: Any) -> CompileResult:
    message, line, column = error if isinstance(error, list) and len(error) == 3 else (str(error), None, None)
    return CompileResult(
        CompileStatus.SYNTAX_ERROR,
        str(message),
        line if isinstance(line, int) else None,
        column if isinstance(column, int) else None,
    )
