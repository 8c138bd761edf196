import pytest

from ludic.envs.code_exec.adapters import APPS_SYSTEM_PROMPT, APPSTestAdapter, ExactMatchVerifier
from ludic.envs.code_exec.adapters.base import (
    FloatTolerantVerifier,
    OutputVerifier,
    TestAdapter as ProblemAdapter,  # pytest collects what is called Test...
    WhitespaceNormalizedVerifier,
)
from ludic.envs.code_exec.types import compute_hash
from ludic.errors import DataError

ROW = {"question": "Double it.", "inputs": ["1", "2"], "outputs": ["2", "4"], "problem_id": 7}


@pytest.mark.parametrize(
    ("verifier", "actual", "expected", "right", "details"),
    [
        (ExactMatchVerifier(), " 4\n", "4", True, None),
        (ExactMatchVerifier(strip=False), "4\n", "4", False, "Length mismatch: 2 characters instead of 1"),
        (ExactMatchVerifier(), "Yes", "yes", False, "First diff at character 0: 'Y' instead of 'y'"),
        (ExactMatchVerifier(case_sensitive=False), "Yes", "yes", True, None),
        (WhitespaceNormalizedVerifier(), "1  2\n3", "1 2 3 ", True, None),
        (WhitespaceNormalizedVerifier(), "12", "1 2", False, "Length mismatch: 2 characters instead of 3"),
        (FloatTolerantVerifier(), "0.3000000001 a", "0.3 a", True, None),
        (FloatTolerantVerifier(), "0.30001", "0.3", False, "Token 0 differs: '0.30001' instead of '0.3'"),
        (FloatTolerantVerifier(abs_tol=0, rel_tol=0.1), "109", "100", True, None),
        (FloatTolerantVerifier(abs_tol=0, rel_tol=0.1), "111", "100", False, "Token 0 differs: '111' instead of '100'"),
        (FloatTolerantVerifier(), "1 2", "1", False, "Token count mismatch: 2 instead of 1"),
        (FloatTolerantVerifier(rel_tol=1), "5", "inf", False, "Token 0 differs: '5' instead of 'inf'"),
        (FloatTolerantVerifier(), "Infinity", "inf", True, None),
        (FloatTolerantVerifier(), "+4.2e1", "42", True, None),
        (FloatTolerantVerifier(), ".5", "0.50", True, None),
        (FloatTolerantVerifier(), "-0.0", "0", True, None),
        (FloatTolerantVerifier(), "nan", "1", False, "Token 0 differs: 'nan' instead of '1'"),
        (FloatTolerantVerifier(), "4_2", "42", False, "Token 0 differs: '4_2' instead of '42'"),
        (FloatTolerantVerifier(), "\u0664\u0662", "42", False, "Token 0 differs: '\u0664\u0662' instead of '42'"),
    ],
)
def test_verdicts(verifier, actual, expected, right, details):
    assert isinstance(verifier, OutputVerifier)
    assert verifier.verify(actual, expected) == (right, details)


def test_rows_of_apps():
    adapter = APPSTestAdapter()
    assert isinstance(adapter, ProblemAdapter)
    tests = adapter.get_tests(ROW)
    assert [(test.input, test.expected, test.id) for test in tests] == [("1", "2", "test_0"), ("2", "4", "test_1")]
    assert (adapter.get_prompt(ROW), adapter.get_problem_id(ROW)) == ("Double it.", "7")
    assert adapter.get_problem_id({}) == "unknown"
    assert adapter.hash_tests(tests) == compute_hash("[('1', '2'), ('2', '4')]")
    assert all(word in APPS_SYSTEM_PROMPT for word in ("Python", "stdin", "stdout"))


def test_inputs_without_outputs_are_an_error():
    with pytest.raises(DataError, match=r"problem 7 must have as many 'inputs' \(1\) as 'outputs' \(2\)"):
        APPSTestAdapter().get_tests({**ROW, "inputs": ["1"]})


def test_a_missing_column_is_named():
    with pytest.raises(KeyError, match=r"no 'question'; it has \['inputs'"):
        APPSTestAdapter().get_prompt({key: ROW[key] for key in ("inputs", "outputs")})


def test_reference_solutions():
    adapter = APPSTestAdapter()
    assert adapter.get_reference_solution(ROW) is None
    assert not adapter.is_valid_for_sneaky(ROW)
    solved = {**ROW, "solutions": ["print(1)", "print(2)"]}
    assert adapter.get_reference_solution(solved) == "print(1)"
    assert adapter.is_valid_for_sneaky(solved)
    assert adapter.get_reference_solution({"solutions": "print(3)"}) == "print(3)"
    assert not adapter.is_valid_for_sneaky({**solved, "is_nondeterministic": True})
