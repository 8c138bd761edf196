"""Rows of the data sets that are known: their tests, limits and prompts."""

import base64
import json
import pickle
import zlib

import pytest

from ludic.envs.code_exec.adapters import base
from ludic.envs.code_exec.adapters.asserts import read_asserts, read_check_function
from ludic.envs.code_exec.adapters.problem import CodingProblemAdapter, OneProblem, read_limits, read_problem
from ludic.envs.code_exec.calls import FunctionCallRunner, Near, OneOf, Same
from ludic.envs.code_exec.runners import StdinStdoutRunner
from ludic.errors import DataError, DataKeyError


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


SHOWN = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
HIDDEN = json.dumps([{"input": "5", "output": "6", "testtype": "stdin"}])
ONE_CALL = "(Solution().g if 'Solution' in globals() else g)"
STDIN_ROWS = {
    "apps": ({"problem_id": 7, "question": "q", "input_output": json.dumps({"inputs": ["1\n", ["1", "2"]], "outputs": ["2", ["3"]]})},
             [("1\n", "2"), ("1\n2", "3")]),
    "code contests": ({"description": "d", "public_tests": {"input": ["1"], "output": ["2"]}, "private_tests": None,
                       "generated_tests": {"input": ["3"], "output": ["4"]}}, [("1", "2"), ("3", "4")]),
    "live code bench": ({"question_content": "d", "public_test_cases": SHOWN, "private_test_cases": packed(HIDDEN)},
                        [("1", "2"), ("5", "6")]),
    "live code bench, not packed": ({"question_content": "d", "public_test_cases": SHOWN, "private_test_cases": HIDDEN},
                                    [("1", "2"), ("5", "6")]),
    "columns": ({"question": "q", "inputs": ["1"], "outputs": ["2"]}, [("1", "2")]),
    "objects": ({"prompt": "q", "tests": [{"input": 1, "output": 2}]}, [("1", "2")]),
}  # fmt: skip
MBPP = {
    "text": "Add.", "task_id": 3, "test_list": ["assert f(1)==2", "assert f(2) == (3,)"], "test_setup_code": "import math",
    "test_imports": ["import re"], "challenge_test_list": ["assert f(9) == 1"], "code": "f = 1",
}  # fmt: skip
HUMAN_EVAL = {
    "prompt": 'import math\ndef f(x):\n    """Add 1."""\n', "entry_point": "f", "task_id": "HumanEval/0",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1) == 2, 'no'\n    assert True\n",
}  # fmt: skip
CALL_ROWS = {
    "apps": ({"question": "q", "input_output": {"fn_name": "g", "inputs": [[1, None]], "outputs": [[3]]}},
             [(f"{ONE_CALL}(*[1, None])", OneOf(([3], 3)))]),
    "apps, a list": ({"question": "q", "input_output": {"fn_name": "g", "inputs": [[1]], "outputs": [[0, 0, 0]]}},
                     [(f"{ONE_CALL}(*[1])", [0, 0, 0])]),
    "live code bench": ({"question_content": "d", "metadata": '{"func_name": "g"}', "public_test_cases": json.dumps(
        [{"input": '[1]\n"a"', "output": "true", "testtype": "functional"}])}, [(f"{ONE_CALL}(*[[1], 'a'])", True)]),
    "columns": ({"question": "q", "function": "g", "inputs": [[1]], "outputs": [2]}, [(f"{ONE_CALL}(*[1])", 2)]),
    "mbpp": (MBPP, [("f(1)", 2), ("f(2)", (3,)), ("f(9)", 1)]),
    "human eval": (HUMAN_EVAL, [("f(1)", 2)]),
    "asserts": ({"prompt": "p", "tests": ["assert f(1) == 2", "assert f(2) == 3"]}, [("f(1)", 2), ("f(2)", 3)]),
    "one text": ({"prompt": "p", "tests": "assert f(1) == 2\nassert f(2) == 3"}, [("f(1)", 2), ("f(2)", 3)]),
}  # fmt: skip


@pytest.mark.parametrize(("row", "tests"), STDIN_ROWS.values(), ids=STDIN_ROWS)
def test_programs_that_read_stdin(row, tests):
    problem = read_problem(row)
    assert [(test.input, test.expected) for test in problem.tests] == tests
    assert [test.id for test in problem.tests] == [f"test_{place}" for place in range(len(tests))]
    assert isinstance(problem.make_runner(1.0, 64), StdinStdoutRunner)


@pytest.mark.parametrize(("row", "tests"), CALL_ROWS.values(), ids=CALL_ROWS)
def test_functions_that_are_called(row, tests):
    problem = read_problem(row)
    assert [(test.input, test.expected) for test in problem.tests] == tests
    assert len({test.id for test in problem.tests}) == len(tests)
    assert isinstance(problem.make_runner(1.0, 64), FunctionCallRunner)


def test_a_prompt_names_the_function():
    assert read_problem(MBPP).prompt == "Add.\n\nThe program must pass this test, and others:\nassert f(1)==2"
    assert read_problem(MBPP).before.startswith("import re\n")
    assert "def f(x):" in read_problem(HUMAN_EVAL).prompt
    assert read_problem(HUMAN_EVAL).before == "import math\n"
    assert "Write a function `g`." in read_problem(CALL_ROWS["apps"][0]).prompt
    starter = {**CALL_ROWS["live code bench"][0], "starter_code": "class Solution:"}
    assert "```python\nclass Solution:\n```" in read_problem(starter).prompt


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "tests": "import math\nassert math.floor(f(2.5)) == 2"},
        {"prompt": "p", "tests": ["import math", "from solution import f\nassert math.floor(f(2.5)) == 2"]},
        {**MBPP, "test_list": ["import math\nassert math.floor(f(2.5)) == 2"], "test_setup_code": "", "challenge_test_list": []},
        {**HUMAN_EVAL, "prompt": "def f(x):\n", "test": "import math\ndef check(f):\n assert math.floor(f(2.5)) == 2"},
        {**HUMAN_EVAL, "prompt": "def f(x):\n", "test": "def check(f):\n import math\n assert math.floor(f(2.5)) == 2"},
    ],
)
def test_what_tests_import_is_there(row):
    problem = read_problem(row)
    names = {}
    exec(problem.before, names)
    exec("def f(x): return x", names)
    assert [eval(test.input, names) for test in problem.tests] == [2]


def test_the_adapter_reads_rows_and_problems():
    row = {"problem_id": 7, "question": "q", "inputs": ["1"], "outputs": ["2"], "solutions": ["a", "b"]}
    for adapter in (CodingProblemAdapter(), OneProblem(read_problem(row))):
        assert isinstance(adapter, base.TestAdapter)
        assert (adapter.get_prompt(row), adapter.get_problem_id(row)) == ("q", "7")
        assert len(adapter.get_tests(row)) == 1
    assert CodingProblemAdapter().get_reference_solution(row) == "a"
    assert CodingProblemAdapter(prompt_column="other").get_prompt({**row, "other": "o"}) == "o"


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"question": "q"}, "has no tests"),
        ({"question": "q", "inputs": [], "outputs": []}, "has no tests"),
        ({"question": "q", "inputs": ["1"], "outputs": []}, "as many 'inputs' (1) as 'outputs' (0)"),
        ({"question": "q", "input_output": "{"}, "not JSON"),
        ({"question": "q", "input_output": "[]"}, "two lists"),
        ({"question": "q", "tests": [{"in": 1}]}, "`input` and `output`"),
        ({"question": "q", "tests": ["assert f(1) == g(1)"]}, "not written out"),
        ({"question": "q", "fn_name": "f(", "inputs": [[1]], "outputs": [1]}, "one of Python's"),
        ({"question": "q", "fn_name": "f", "inputs": [1], "outputs": [1]}, "must be a list"),
        ({"question": "q", "private_test_cases": packed([print])}, "pickles of anything else are not read"),
        ({"question": "q", "private_test_cases": "%%"}, "neither JSON nor packed"),
        ({"question": "q", "public_test_cases": SHOWN, "time_limit": "soon"}, "time_limit ('soon') must be"),
        ({**HUMAN_EVAL, "test": "x = 1"}, "no function check"),
        ({**HUMAN_EVAL, "prompt": "Add 1."}, "without its body, is not Python"),
    ],
)
def test_what_cannot_be_judged_is_refused_with_the_reason(row, error):
    with pytest.raises(DataError) as raised:
        read_problem(row)
    assert error in str(raised.value)


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(DataKeyError, match="question"):
        read_problem({"inputs": ["1"], "outputs": ["1"]})


class RunsWhenUnpickled:
    def __reduce__(self):
        return pytest.fail, ("it ran",)


def test_a_pickle_does_not_run():
    with pytest.raises(DataError, match="not read"):
        read_problem({"question": "q", "private_test_cases": packed(RunsWhenUnpickled())})


@pytest.mark.parametrize(
    ("row", "limits"),
    [
        ({}, {}),
        ({"time_limit": None, "memory_limit": ""}, {}),
        ({"time_limit": "2.0 seconds", "memory_limit": "256.0 megabytes"}, {"timeout_s": 2.0, "memory_limit_mb": 256.0}),
        ({"time_limit": {"seconds": 2, "nanos": 500_000_000}, "memory_limit_bytes": 1 << 28},
         {"timeout_s": 2.5, "memory_limit_mb": 256.0}),
        ({"time_limit": "500 ms", "memory_limit": "1 GB"}, {"timeout_s": 0.5, "memory_limit_mb": 1024.0}),
        ({"timeout_s": 3, "memory_limit_mb": 64}, {"timeout_s": 3.0, "memory_limit_mb": 64.0}),
    ],
)  # fmt: skip
def test_limits_of_the_data_are_those_of_its_tests(row, limits):
    assert read_limits(row) == limits
    assert read_problem({"question": "q", "inputs": ["1"], "outputs": ["1"], **row}).tests[0].metadata == limits


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("assert f(2) == 3", [("f(2)", 3)]),
        ("assert (3, [1.5, None]) == f(2), 'why'", [("f(2)", (3, [1.5, None]))]),
        ("import math\n'text'\nassert f(1) is None", [("f(1)", None)]),
        ("assert f(1)", [("bool(f(1))", True)]),
        ("assert not f(1)", [("bool(f(1))", False)]),
        ("assert f(1) == 1 and f(2) == -2", [("f(1)", 1), ("f(2)", -2)]),
        ("assert abs(f(1) - 1.5) < 1e-3", [("f(1)", Near(1.5, abs_tol=1e-3))]),
        ("assert math.isclose(f(1), 2.5, rel_tol=0.1)", [("f(1)", Near(2.5, rel_tol=0.1))]),
        ("assert isclose(2.5, f(1))", [("f(1)", Near(2.5, rel_tol=1e-9))]),
        ("assert set(f(1)) == set([1, 2])", [("set(f(1))", {1, 2})]),
        ("assert f(1) == True", [("f(1)", True)]),
        ("assert False is f(1)", [("f(1)", Same(False))]),
        ("assert round(f(2 - 1), 2) == 0.5", [("round(f(2 - 1), 2)", 0.5)]),
        ("assert f([x for x in range(3)])[0] == 1", [("f([x for x in range(3)])[0]", 1)]),
        ("assert ', '.join(f([1, 2][0])) == 'a, b'", [("', '.join(f([1, 2][0]))", "a, b")]),
        ("assert f(1) == float('inf')", [("f(1)", float("inf"))]),
        ("assert sorted(f('a == b')) == ['a']", [("sorted(f('a == b'))", ["a"])]),
    ],
)
def test_asserts_are_taken_apart(source, tests):
    assert [(test.input, test.expected) for test in read_asserts(source)] == tests


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) == g(1)", "assert f(1) != 2", "assert f(1) in (1, 2)", "assert f(1) > 2", "assert 1 < f(1) < 3",
        "assert isinstance(f(1), int)", "assert all(f(i) == i for i in range(3))", "assert f(1) == 1 or f(1) == 2", "assert 1 == 1",
        "assert (f(2) == 3) == True", "assert isinstance(f(1), int) == True", "assert any(f(2)==x for x in (3,4)) == True",
        "assert (lambda y: y==3)(f(1)) == True", "assert [f(1) == 3] == [True]", "assert (f(1) and 3) == 3",
        "assert [isinstance(f(1), int)] == [True]", "assert (1 if f(1) else 2) == 1", "assert (not f(1)) == False",
        "assert f(1) - 3 == 0", "assert abs(f(1) - 3) == 0", "assert abs((f(1) - 3) - 0) < 1", "assert len({f(1), 3}) == 1",
        "assert [3].count(f(1)) == 1", "assert {3: 1}[f(1)] == 1", "assert f(1).__eq__(3)", "assert max(f(1), 3) == 3",
        "assert operator.eq(f(1), 3) is True", "assert math.isclose(f(1), 3) == True", "assert np.allclose(f(1), [3])",
        "assert f(lambda x: x == 3)", "for i in range(3):\n    assert f(i) == i", "x = f(1)\nassert x == 1", "assert f(1",
    ],
)  # fmt: skip
def test_asserts_that_would_be_judged_in_the_sandbox_are_refused(source):
    with pytest.raises(DataError):
        read_asserts(source)


def test_the_candidate_is_renamed_but_not_in_texts():
    source = "def check(candidate):\n    assert candidate('candidate') == 1"
    assert read_check_function(source, entry_point="f")[0].input == "f('candidate')"


def test_what_is_expected_is_in_no_call():
    """Of any assert that is taken apart."""
    secret = 271_828
    for form in (
        "f(1) == {}",
        "{} == f(1)",
        "abs(f(1) - {}) < 1",
        "isclose(f(1), {})",
        "f(1) == [{}] and f(2) == 1",
        "f(1) is {}",
    ):
        for test in read_asserts(f"assert {form.format(secret)}"):
            assert str(secret) not in test.input


NODES = "class Node:\n    def __init__(self, value): self.value = value\n"


def asserts(test, **texts):
    return {"prompt": "p", "test_list": [f"assert {test}"], **texts}


@pytest.mark.parametrize(
    ("row", "expression"),
    [
        ({"question": "q", "function": "pow", "inputs": [[2, 3]], "outputs": [8]},
         "(Solution().pow if 'Solution' in globals() else globals()['pow'])(*[2, 3])"),
        (asserts("sum(10, 15) == 6"), "globals()['sum'](10, 15)"),
        (asserts("set(f(1)) == {1}"), "set(f(1))"),
        (asserts("abs(sum(1, 2) - 3) < 0.1"), "globals()['sum'](1, 2)"),
        ({**HUMAN_EVAL, "prompt": "def sorted(x):\n", "entry_point": "sorted",
          "test": "def check(candidate):\n    assert list(candidate([1])) == [1]"}, "list(globals()['sorted']([1]))"),
        (asserts("height(root) == 3", test_setup_code="root = Node(1)"), "height(root)"),
        (asserts("same(f(1), 3) == 4", test_setup_code="def same(a, b): return a + b"), "same(f(1), 3)"),
        (asserts("probe() == 3", test_setup_code="def probe(): return f(3)"), "probe()"),
    ],
)  # fmt: skip
def test_a_test_needs_something_of_the_program(row, expression):
    assert [test.input for test in read_problem(row).tests] == [expression]


@pytest.mark.parametrize(
    "row",
    [
        asserts("f(2) == 4", test_setup_code="def f(x):\n    return 2 * x"),
        asserts("f(2) == 4", test_setup_code="f = lambda x: 2 * x"),
        asserts("value(2) == 2", test_setup_code=f"{NODES}def value(x): return Node(x).value"),
        asserts("floor(2.5) == 2", test_setup_code="from math import floor"),
        asserts("sum(2, 3) == 5", test_setup_code="def sum(a, b): return a + b"),
        asserts("max(list([1])) == 1"),
        asserts("'a'.upper() == 'A'"),
        {"prompt": "p", "tests": ["assert f(2) == 4"], "before": "def f(x):\n    return 2 * x"},
    ],
)
def test_a_test_that_would_pass_without_the_program_is_refused(row):
    with pytest.raises(DataError, match="needs nothing of the program"):
        read_problem(row)


def test_a_setup_that_is_not_python_is_refused():
    with pytest.raises(DataError, match="not Python"):
        read_problem(asserts("f(2) == 4", test_setup_code="x ="))
