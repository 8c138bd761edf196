"""What code execution exchanges: tests and their hashes, the results of compiling and running
a program, and the protocols of a sandbox, which runs programs, and of a pool of sandboxes.

Example: a program that should double its input, with two tests, of which the second failed::

    tests = [TestCase("2", "4", id="a"), TestCase("3", "6", id="b")]
    result.passed_count, result.total_count, result.pass_rate == (1, 2, 0.5)
    result.first_failure.test_case.id == "b"
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from ludic.errors import GradingError, LudicError


class SandboxPoolExhaustedError(GradingError):
    """A pool gave up: too many sandboxes in a row could not be started or reset. The message has
    the last failure."""


class NoSandboxError(LudicError, RuntimeError):
    """A backend that does not work on this machine. The message says what to install."""


class CompileStatus(StrEnum):
    SUCCESS = "success"
    SYNTAX_ERROR = "syntax_error"
    IMPORT_ERROR = "import_error"
    TIMEOUT = "timeout"
    UNKNOWN_ERROR = "unknown_error"


class RunStatus(StrEnum):
    SUCCESS = "success"
    """The program ended with exit status 0. Whether its output is right is for a verifier."""
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    MEMORY_EXCEEDED = "memory_exceeded"
    KILLED = "killed"
    """By a signal that is not due to a limit."""
    NOT_RUN = "not_run"
    """An earlier test failed, or the program does not compile."""
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox failed, not the program: this says nothing about the program."""


@dataclass
class CompileResult:
    """Whether a program is valid."""

    status: CompileStatus
    error_message: str | None = None
    error_line: int | None = None
    """From 1."""
    error_column: int | None = None
    """From 1."""
    duration_ms: float = 0.0

    @property
    def success(self) -> bool:
        return self.status is CompileStatus.SUCCESS


@dataclass
class ExecutionResult:
    """One run of a program."""

    compile_result: CompileResult
    run_status: RunStatus | None = None
    """None if it was compiled only."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    return_value: Any = None
    """Of a function that was called, for runners that call functions."""
    compile_duration_ms: float = 0.0
    run_duration_ms: float = 0.0
    total_duration_ms: float = 0.0
    peak_memory_bytes: int | None = None
    cpu_time_ms: float | None = None
    cache_hit: bool = False
    cache_key: str | None = None
    """In the answers of `execute_batch`: the `TestCase.id` that this is the run of."""

    @property
    def compiled(self) -> bool:
        return self.compile_result.success

    @property
    def succeeded(self) -> bool:
        """Whether it compiled and ended with exit status 0."""
        return self.compiled and self.run_status is RunStatus.SUCCESS

    @property
    def timed_out(self) -> bool:
        """Whether compiling or running took too long."""
        return self.compile_result.status is CompileStatus.TIMEOUT or self.run_status is RunStatus.TIMEOUT


@dataclass
class TestCase:
    """An input and the output that is expected for it."""

    __test__ = False  # not a test class of pytest

    input: Any
    expected: Any
    id: str = ""
    weight: float = 1.0
    metadata: dict[str, Any] = field(default_factory=dict)
    """`timeout_s` and `memory_limit_mb` here are limits of this test alone."""


@dataclass
class BatchExecutionSpec:
    """A program and its tests, for `execute_batch` of a sandbox. A sandbox of ours reads the inputs
    alone: the expected output never enters it."""

    code: str
    tests: list[TestCase]
    compile_first: bool = True
    timeout_s: float = 5.0
    stop_on_first_failure: bool = True


@dataclass
class TestResult:
    """The verdict on one test."""

    __test__ = False

    test_case: TestCase
    passed: bool
    actual: Any
    """The output, or None if the program did not run."""
    execution: ExecutionResult
    comparison_details: str | None = None
    """Why it failed."""

    @property
    def compiled(self) -> bool:
        return self.execution.compiled

    @property
    def ran(self) -> bool:
        return self.execution.run_status not in (None, RunStatus.NOT_RUN)


@dataclass
class BatchTestResult:
    """The verdicts on all tests of a program, in the order of the tests."""

    results: Sequence[TestResult]
    code_hash: str
    tests_hash: str

    @property
    def passed_count(self) -> int:
        return sum(result.passed for result in self.results)

    @property
    def total_count(self) -> int:
        return len(self.results)

    @property
    def all_passed(self) -> bool:
        """False without tests."""
        return bool(self.results) and self.passed_count == self.total_count

    @property
    def pass_rate(self) -> float:
        """Tests passed / tests; 0 without tests."""
        return self.passed_count / self.total_count if self.results else 0.0

    @property
    def first_failure(self) -> TestResult | None:
        return next((result for result in self.results if not result.passed), None)

    @property
    def compile_failed(self) -> bool:
        """Whether the program is not valid; False without tests."""
        return bool(self.results) and not self.results[0].compiled

    @property
    def sandbox_failed(self) -> bool:
        """Whether some test has no verdict, because its sandbox failed."""
        return any(result.execution.run_status is RunStatus.SANDBOX_ERROR for result in self.results)

    @property
    def total_execution_ms(self) -> float:
        return sum(result.execution.total_duration_ms for result in self.results)

    @property
    def total_compile_ms(self) -> float:
        """The longest: the program is compiled once, or once for each test at the same time."""
        return max((result.execution.compile_duration_ms for result in self.results), default=0.0)

    @property
    def total_run_ms(self) -> float:
        return sum(result.execution.run_duration_ms for result in self.results)

    def get_failures(self) -> list[TestResult]:
        return [result for result in self.results if not result.passed]

    def get_successes(self) -> list[TestResult]:
        return [result for result in self.results if result.passed]


@runtime_checkable
class Sandbox(Protocol):
    """Runs one program after another, without harm to anything outside."""

    @property
    def python_version(self) -> str: ...

    async def reset(self) -> None:
        """End what the last program left, and delete its files. An error means that the sandbox
        must not be used again."""

    async def compile(self, code: str, *, timeout_s: float = 5.0) -> CompileResult: ...

    async def execute(
        self,
        code: str,
        *,
        stdin: str = "",
        skip_compile: bool = False,
        timeout_s: float = 10.0,
        memory_limit_mb: int | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> ExecutionResult: ...


@runtime_checkable
class BatchSandbox(Sandbox, Protocol):
    """A sandbox that takes a program with all its tests."""

    def execute_batch(self, spec: BatchExecutionSpec) -> AsyncGenerator[CompileResult | ExecutionResult | dict[str, Any], None]:
        """A CompileResult, if it compiles first; then an ExecutionResult for each test that ran,
        with the test's id as `cache_key`; last `{"type": "done", ...}`."""


@runtime_checkable
class SandboxPool(Protocol):
    """Lends sandboxes, and keeps results."""

    @property
    def python_version(self) -> str: ...

    @property
    def available(self) -> int:
        """Sandboxes that can be lent at the same time."""

    @property
    def cache_stats(self) -> dict[str, int]: ...

    async def start(self) -> None: ...

    async def checkout(self, timeout_s: float = 30.0) -> Sandbox: ...

    async def release(self, sandbox: Sandbox) -> None: ...

    async def shutdown(self) -> None: ...

    def get_cached(self, code_hash: str, tests_hash: str) -> BatchTestResult | None: ...

    def put_cached(self, code_hash: str, tests_hash: str, result: BatchTestResult) -> None: ...


class HashedTests(list[TestCase]):
    """Tests whose hash is known: a runner that is given these does not compute one."""

    def __init__(self, tests: Iterable[TestCase], tests_hash: str) -> None:
        super().__init__(tests)
        self.tests_hash = tests_hash


def compute_hash(content: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the text."""
    return hashlib.sha256(content.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def hash_tests(tests: Sequence[TestCase]) -> str:
    """The hash of inputs and expected outputs in their order; ids do not count. Of `HashedTests`
    the one that they have."""
    if isinstance(tests, HashedTests):
        return tests.tests_hash
    return compute_hash(json.dumps([(test.input, test.expected) for test in tests], sort_keys=True, default=str))


def hash_calls(tests: Sequence[TestCase]) -> str:
    """As `hash_tests`, for expected values of which a list and a tuple differ."""
    if isinstance(tests, HashedTests):
        return tests.tests_hash
    return compute_hash(repr([(test.input, test.expected) for test in tests]))
