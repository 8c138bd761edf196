import pytest

from ludic.envs.code_exec.types import (
    BatchTestResult,
    CompileResult,
    CompileStatus,
    ExecutionResult,
    HashedTests,
    RunStatus,
    TestCase,
    TestResult,
    compute_hash,
    hash_calls,
    hash_tests,
)

VALID = CompileResult(CompileStatus.SUCCESS)


def result(passed, status=RunStatus.SUCCESS, compiled=VALID, **durations):
    return TestResult(TestCase("1", "2"), passed, "", ExecutionResult(compiled, status, **durations))


def test_the_counts_of_a_batch():
    failed = result(False, RunStatus.RUNTIME_ERROR, run_duration_ms=2, compile_duration_ms=5, total_duration_ms=7)
    batch = BatchTestResult([result(True, run_duration_ms=1, total_duration_ms=1), failed], "c", "t")
    assert (batch.passed_count, batch.total_count, batch.pass_rate, batch.all_passed) == (1, 2, 0.5, False)
    assert batch.first_failure is failed
    assert batch.get_failures() == [failed]
    assert len(batch.get_successes()) == 1
    assert (batch.total_execution_ms, batch.total_compile_ms, batch.total_run_ms) == (8, 5, 3)


def test_a_batch_without_tests_has_passed_nothing():
    batch = BatchTestResult([], "c", "t")
    assert (batch.all_passed, batch.pass_rate, batch.compile_failed, batch.first_failure) == (False, 0.0, False, None)


def test_compile_failures_and_sandbox_failures_are_told_apart():
    invalid = BatchTestResult([result(False, RunStatus.NOT_RUN, CompileResult(CompileStatus.SYNTAX_ERROR))], "c", "t")
    broken = BatchTestResult([result(True), result(False, RunStatus.SANDBOX_ERROR)], "c", "t")
    assert (invalid.compile_failed, invalid.sandbox_failed) == (True, False)
    assert (broken.compile_failed, broken.sandbox_failed) == (False, True)


@pytest.mark.parametrize(
    ("compiled", "status", "expected"),
    [
        ("success", RunStatus.SUCCESS, (True, True, False, True)),
        ("success", RunStatus.TIMEOUT, (True, False, True, True)),
        ("success", RunStatus.NOT_RUN, (True, False, False, False)),
        ("success", None, (True, False, False, False)),
        ("timeout", RunStatus.NOT_RUN, (False, False, True, False)),
        ("syntax_error", RunStatus.NOT_RUN, (False, False, False, False)),
    ],
)
def test_what_a_result_says_of_its_run(compiled, status, expected):
    execution = ExecutionResult(CompileResult(CompileStatus(compiled)), status)
    test = TestResult(TestCase("", ""), False, None, execution)
    assert (execution.compiled, execution.succeeded, execution.timed_out, test.ran) == expected


def test_hashes_depend_on_inputs_outputs_and_order_but_not_on_ids():
    one, other = TestCase("1", "2", id="a"), TestCase("3", "4", id="b")
    assert compute_hash("abc") == "ba7816bf8f01cfea"  # the beginning of SHA-256("abc")
    assert hash_tests([one, other]) == hash_tests([TestCase("1", "2"), TestCase("3", "4", id="c")])
    assert len({hash_tests([one, other]), hash_tests([other, one]), hash_tests([one])}) == 3
    assert compute_hash("\ud800") == compute_hash("\ud800")  # a lone surrogate is no error


def test_tests_whose_hash_is_known_are_not_hashed_again():
    known = HashedTests([TestCase("1", "2")], "known")
    assert hash_tests(known) == hash_calls(known) == "known"
