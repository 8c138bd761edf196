"""Judges programs by the values of calls: the calls run in a sandbox, and their values, which come
as JSON, are compared outside with the expected ones.

Nothing of a sandbox's answer is made an object of a class, a key or a member of a set: it is looked
up in the expected values, so that no answer costs more than its length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.adapters.base import OutputVerifier
from ludic.envs.code_exec.runners import STDERR_LINES, crashed, judge, limit_of, not_compiled, not_run
from ludic.envs.code_exec.types import (
    BatchTestResult,
    CompileResult,
    CompileStatus,
    ExecutionResult,
    RunStatus,
    Sandbox,
    TestCase,
    TestResult,
    compute_hash,
    hash_calls,
)

_SHOWN = 200


@dataclass(frozen=True)
class Near:
    """A number, or a list or tuple of numbers, that need not be exact: `abs_tol` or `rel_tol` x
    |expected|, whichever is more, is allowed."""

    value: Any
    abs_tol: float = 0.0
    rel_tol: float = 0.0


@dataclass(frozen=True)
class OneOf:
    """Any of these values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Same:
    """True or False itself, as `is` has it: not 1 or 0."""

    value: bool


@dataclass(frozen=True, kw_only=True)
class ValueVerifier:
    """The value equals the expected one, as `==` of Python's own types has it: 1 equals 1.0, and a
    list equals no tuple, unless `tuples_are_lists`."""

    tuples_are_lists: bool = False
    """For data sets in JSON."""

    def verify(self, actual: Any, expected: Any) -> tuple[bool, str | None]:
        """`actual` is the JSON of `in_program.encode`."""
        if isinstance(expected, OneOf):
            verdicts = [self.verify(actual, value) for value in expected.values]
            return next((verdict for verdict in verdicts if verdict[0]), verdicts[0])
        near = expected if isinstance(expected, Near) else None
        try:
            if isinstance(expected, Same):
                right = actual is expected.value
                return right, None if right else f"Returned {_cut(show(actual))}, which is not {expected.value}"
            if self._agrees(actual, near.value if near else expected, near):
                return True, None
            wanted = f"about {near.value!r}" if near else repr(expected)
            return False, f"Returned {_cut(show(actual))} instead of {_cut(wanted)}"
        except RecursionError:
            return False, "Returned a value that is nested too deeply"

    def _agrees(self, actual: Any, expected: Any, near: Near | None) -> bool:
        if not isinstance(actual, Mapping):
            return _is_scalar(expected) and _scalars_agree(actual, expected, near)
        [(kind, content)] = actual.items() if len(actual) == 1 else [("", None)]
        if kind == "int":
            number = _long_int(content)
            return number is not None and _is_scalar(expected) and _scalars_agree(number, expected, near)
        if kind == "complex" and isinstance(expected, int | float | complex):
            return bool(content == [expected.real, expected.imag])
        if kind == "bytes":
            return isinstance(expected, bytes) and content == expected.hex()
        if not isinstance(content, list):
            return False
        if kind in ("list", "tuple"):
            wanted = (list, tuple) if self.tuples_are_lists else {"list": list, "tuple": tuple}[kind]
            if not isinstance(expected, wanted) or len(content) != len(expected):
                return False
            return all(self._agrees(one, other, near) for one, other in zip(content, expected, strict=True))
        if kind in ("set", "frozenset"):
            return isinstance(expected, set | frozenset) and self._members_agree(content, expected)
        return kind == "dict" and isinstance(expected, Mapping) and self._entries_agree(content, expected, near)

    def _members_agree(self, content: list[Any], expected: set[Any] | frozenset[Any]) -> bool:
        """Each is one of those expected, and none comes twice."""
        if len(content) != len(expected):
            return False
        keys = {_key(one) for one in expected}
        return {key for key in map(self._key_of, content) if key in keys} == keys

    def _entries_agree(self, content: list[Any], expected: Mapping[Any, Any], near: Near | None) -> bool:
        if len(content) != len(expected) or not all(isinstance(entry, list) and len(entry) == 2 for entry in content):
            return False
        by_key = {_key(key): value for key, value in expected.items()}
        found = set()
        for written, value in content:
            key = self._key_of(written)
            if key not in by_key or not self._agrees(value, by_key[key], near):
                return False
            found.add(key)
        return len(found) == len(by_key)

    def _key_of(self, actual: Any) -> Any:
        """The same for two values that are equal; None if it cannot be in a set."""
        if not isinstance(actual, Mapping):
            return _key(actual)
        [(kind, content)] = actual.items() if len(actual) == 1 else [("", None)]
        if kind in ("tuple", "frozenset") and isinstance(content, list):
            inner = [self._key_of(one) for one in content]
            if None in inner:
                return None
            return f"({','.join(inner)})" if kind == "tuple" else f"{{{','.join(sorted(inner))}}}"
        if kind == "int":
            return None if (number := _long_int(content)) is None else _key(number)
        return f"bytes {content}" if kind == "bytes" else None


def _key(value: Any) -> str:
    """Text that is the same for two scalars, tuples and frozensets if these are equal.

    Example: 1, 1.0 and True are all `0x1`.
    """
    if isinstance(value, tuple):
        return f"({','.join(map(_key, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_key, value)))}}}"
    if isinstance(value, bytes):
        return f"bytes {value.hex()}"
    if isinstance(value, bool | int) or (isinstance(value, float) and value.is_integer()):
        return hex(int(value))
    return repr(value)


def _long_int(written: Any) -> int | None:
    """Example: `"0x1f"` is 31. None for any other text."""
    try:
        return int(written, 16) if isinstance(written, str) else None
    except ValueError:
        return None


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | complex)


def _scalars_agree(actual: Any, expected: Any, near: Near | None) -> bool:
    if isinstance(actual, list):
        return False
    if near is None or isinstance(expected, str) or expected is None or not isinstance(actual, int | float):
        return bool(actual == expected)
    try:
        return actual == expected or math.isclose(actual, expected, rel_tol=near.rel_tol, abs_tol=near.abs_tol)
    except (OverflowError, TypeError):
        return False


def show(actual: Any) -> str:
    """The value as Python writes it, more or less, for messages."""
    if not isinstance(actual, Mapping):
        return repr(actual)
    [(kind, content)] = actual.items() if len(actual) == 1 else [("", None)]
    if not isinstance(content, list):
        return f"a value of type {content}" if kind == "other" else f"{kind} {content}"
    if kind == "dict":
        entries = (entry for entry in content if isinstance(entry, list) and len(entry) == 2)
        return f"{{{', '.join(f'{show(key)}: {show(value)}' for key, value in entries)}}}"
    inner = ", ".join(map(show, content))
    return {"list": f"[{inner}]", "tuple": f"({inner})"}.get(str(kind), f"{kind}({inner})")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


VALID = CompileResult(CompileStatus.SUCCESS)
BEFORE_PROGRAM = Path(__file__).with_name("in_program.py").read_text(encoding="utf-8")
NO_ANSWERS = "The program wrote something else to where the values of its calls are written"


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
        source = f"{BEFORE_PROGRAM}\n\nmain({code!r}, {self._before!r}, {self._after!r})\n"
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
                results += [crashed(test, VALID, error) for test in rest]
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
        error = answers[0]["syntax_error"]
        message, line, column = error if isinstance(error, list) and len(error) == 3 else (str(error), None, None)
        compiled = CompileResult(
            CompileStatus.SYNTAX_ERROR,
            str(message),
            line if isinstance(line, int) else None,
            column if isinstance(column, int) else None,
        )
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
