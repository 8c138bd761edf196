import asyncio

import pytest

from ludic.envs.code_exec.adapters.base import ExactMatchVerifier
from ludic.envs.code_exec.runners import CodeRunner, StdinStdoutRunner
from ludic.envs.code_exec.types import CompileResult, CompileStatus, ExecutionResult, RunStatus, TestCase
from ludic.errors import DataError

VALID = CompileResult(CompileStatus.SUCCESS)
INVALID = CompileResult(CompileStatus.SYNTAX_ERROR, "unexpected indent", 3)


class Doubling:
    """A sandbox with the documented methods alone. The "program" is a table of what inputs do;
    others are doubled."""

    python_version = "3.11"

    def __init__(self, behaviour=None, compiled=VALID):
        self.behaviour, self.compiled, self.calls = behaviour or {}, compiled, []

    async def reset(self):
        pass

    async def compile(self, code, *, timeout_s=5.0):
        self.calls.append(("compile", timeout_s))
        return self.compiled

    async def execute(self, code, *, stdin="", skip_compile=False, timeout_s=10.0, memory_limit_mb=None, env_vars=None):
        self.calls.append((stdin, skip_compile, timeout_s, memory_limit_mb))
        return self.answer(stdin)

    def answer(self, stdin, key=None):
        outcome = self.behaviour.get(stdin, RunStatus.SUCCESS)
        if isinstance(outcome, Exception):
            raise outcome
        out = str(2 * int(stdin)) if outcome is RunStatus.SUCCESS else ""
        return ExecutionResult(VALID, outcome, out, stderr="".join(f"line {i}\n" for i in range(9)), cache_key=key)


class Batching(Doubling):
    def __init__(self, *arguments, done=True, **settings):
        super().__init__(*arguments, **settings)
        self.done, self.specs = done, []

    async def execute_batch(self, spec):
        self.specs.append(spec)
        yield self.compiled
        for test in reversed(spec.tests) if not spec.stop_on_first_failure else spec.tests:
            self.calls.append(test.input)
            yield self.answer(test.input, test.id)
        if self.done:
            yield {"type": "done"}


def doubles_of(*numbers, **metadata):
    return [TestCase(str(n), str(2 * n), id=f"t{n}", metadata=metadata) for n in numbers]


def run(sandbox, tests, runner=None, **settings):
    runner = runner or StdinStdoutRunner()
    assert isinstance(runner, CodeRunner)
    return asyncio.run(runner.run_tests(sandbox, "code", tests, verifier=ExactMatchVerifier(), **settings))


def statuses(batch):
    return [result.execution.run_status for result in batch.results]


@pytest.mark.parametrize("kind", [Doubling, Batching])
@pytest.mark.parametrize("stop", [False, True])
def test_every_kind_of_sandbox_gives_the_same_verdicts(kind, stop):
    tests = [*doubles_of(1, 2), TestCase("3", "7", id="wrong"), *doubles_of(4)]
    batch = run(kind(), tests, stop_on_first_failure=stop)
    assert [result.passed for result in batch.results] == [True, True, False, not stop]
    assert statuses(batch)[3] is (RunStatus.NOT_RUN if stop else RunStatus.SUCCESS)
    assert [result.test_case for result in batch.results] == tests
    assert batch.results[2].actual == "6"


def test_a_wrong_answer_ends_a_batch_that_stops_at_the_first_failure():
    sandbox = Batching()
    run(sandbox, [TestCase("3", "7"), *doubles_of(4)], stop_on_first_failure=True)
    assert sandbox.calls == ["3"]


@pytest.mark.parametrize("kind", [Doubling, Batching])
def test_a_program_that_does_not_compile_fails_every_test_without_running(kind):
    batch = run(kind(compiled=INVALID), doubles_of(1, 2))
    assert batch.compile_failed
    assert statuses(batch) == [RunStatus.NOT_RUN] * 2
    assert batch.results[0].comparison_details == "Compilation failed: unexpected indent (line 3)"


@pytest.mark.parametrize(
    ("status", "details"),
    [
        (RunStatus.RUNTIME_ERROR, "Runtime error (exit status None):\nline 0\nline 1\nline 2\nline 3\nline 4"),
        (RunStatus.TIMEOUT, "The program timed out after 0 ms"),
        (RunStatus.MEMORY_EXCEEDED, "Memory limit exceeded"),
        (RunStatus.KILLED, "The program was killed (exit status None)"),
    ],
)
def test_why_a_program_failed(status, details):
    (result,) = run(Doubling({"1": status}), doubles_of(1)).results
    assert (result.passed, result.comparison_details) == (False, details)


@pytest.mark.parametrize("kind", [Doubling, Batching])
def test_a_sandbox_that_fails_says_nothing_about_its_tests(kind):
    batch = run(kind({"2": OSError("gone")}), doubles_of(1, 2), stop_on_first_failure=True)
    assert statuses(batch) == [RunStatus.SUCCESS, RunStatus.SANDBOX_ERROR]
    assert batch.sandbox_failed
    assert batch.results[1].comparison_details == "Sandbox crashed: OSError: gone"


def test_a_batch_without_an_end_leaves_unseen_tests_without_a_verdict():
    class Short(Batching):
        async def execute_batch(self, spec):
            yield VALID
            yield self.answer("1", "t1")

    batch = run(Short(), doubles_of(1, 2))
    assert statuses(batch) == [RunStatus.SUCCESS, RunStatus.SANDBOX_ERROR]


def test_tests_without_ids_and_with_the_same_id_are_told_apart():
    tests = [TestCase("1", "2"), TestCase("2", "4", id="a"), TestCase("3", "7", id="a"), TestCase("4", "8", id="#0")]
    batch = run(Batching(), tests)
    assert [result.passed for result in batch.results] == [True, True, False, True]
    assert [result.test_case.id for result in batch.results] == ["", "a", "a", "#0"]


def test_limits_of_a_test_are_its_own():
    sandbox = Doubling()
    run(sandbox, [*doubles_of(1), *doubles_of(2, timeout_s=9, memory_limit_mb=64)], stop_on_first_failure=True)
    assert sandbox.calls == [("compile", 5.0), ("1", True, 5.0, 256), ("2", True, 9, 64)]


def test_a_batch_is_told_all_limits():
    sandbox = Batching()
    run(sandbox, doubles_of(1, timeout_s=9), StdinStdoutRunner(3.0, 64), stop_on_first_failure=True, compile_first=False)
    (spec,) = sandbox.specs
    assert (spec.timeout_s, spec.stop_on_first_failure, spec.compile_first) == (3.0, True, False)
    assert spec.tests[0].metadata == {"timeout_s": 9, "memory_limit_mb": 64}


def test_batches_can_be_turned_off():
    sandbox = Batching()
    run(sandbox, doubles_of(1), StdinStdoutRunner(use_batch_execution=False))
    assert not sandbox.specs
    assert sandbox.calls[0] == ("compile", 5.0)


@pytest.mark.parametrize("kind", [Doubling, Batching])
@pytest.mark.parametrize(
    "limits",
    [{"timeout_s": "5"}, {"timeout_s": -1}, {"timeout_s": float("inf")}, {"timeout_s": float("nan")}, {"memory_limit_mb": 0.5}],
)
def test_a_limit_that_limits_nothing_is_an_error_of_the_data(kind, limits):
    with pytest.raises(DataError, match=r"metadata\['\w+'\] of test 't1' is .*, not a finite number"):
        run(kind(), doubles_of(1, **limits))
