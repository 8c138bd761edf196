"""Programs that are judged by the values of calls, in processes without a sandbox."""

import asyncio
import json
import warnings

import pytest
from fake_sandboxes import VALID, FakePool, Scripted

from ludic.envs.code_exec.adapters.problem import read_problem
from ludic.envs.code_exec.backend import UnsafeSubprocessPool
from ludic.envs.code_exec.calls import FunctionCallRunner
from ludic.envs.code_exec.env import CodeExecConfig, CodeExecEnv
from ludic.envs.code_exec.types import ExecutionResult, RunStatus, TestCase


@pytest.fixture(scope="module")
def sandbox():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = UnsafeSubprocessPool(1)
    asyncio.run(pool.start())
    yield asyncio.run(pool.checkout())
    asyncio.run(pool.shutdown())


def judge(sandbox, code, tests, *, stop=False, **settings):
    runner = FunctionCallRunner(60.0, **settings)
    cases = [TestCase(call, expected) for call, expected in tests]
    return asyncio.run(runner.run_tests(sandbox, code, cases, verifier=runner.default_verifier, stop_on_first_failure=stop))


def passed(batch):
    return [result.passed for result in batch.results]


CALLS = [("f([3, 5])", 8), ("f([])", 0), ("f((1.5,))", 1.5)]


@pytest.mark.parametrize(
    ("code", "verdicts"),
    [
        ("f = sum", [True, True, True]),
        ("def f(a):\n    print('noise', a)\n    return sum(a)", [True, True, True]),
        ("f = lambda a: a[0]", [False, False, True]),
        ("def f(a):\n    raise SystemExit(0)", [False] * 3),
        ("import os\ndef f(a):\n    return sum(a) if a else os._exit(0)", [True, False, True]),
        ("raise ValueError('oh')", [False] * 3),
        ("f = 3", [False] * 3),
        ("", [False] * 3),
        ("f = lambda a: sum(a", [False] * 3),
        ("f = lambda a:\0 sum(a)", [False] * 3),
        ("if __name__ == '__main__':\n    raise SystemExit\nf = sum", [True, True, True]),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int\nf = lambda a: A(sum(a)).b", [True, True, True]),
        ("f = lambda a: input()", [False] * 3),
    ],
)
def test_each_call_has_its_own_verdict(sandbox, code, verdicts):
    assert passed(judge(sandbox, code, CALLS)) == verdicts


def test_a_long_number_takes_no_other_call_with_it(sandbox):
    batch = judge(sandbox, "f = lambda n: [{-10**n}]", [("f(2)", [{-100}]), ("f(5000)", 0), ("f(3)", [{-1000}])])
    assert passed(batch) == [True, False, True]
    assert batch.results[1].execution.run_status is RunStatus.SUCCESS


def test_a_value_that_is_no_json_is_raised(sandbox):
    code = "import sys\nsys.set_int_max_str_digits(640)\nf = lambda n: 10**n"
    batch = judge(sandbox, code, [("f(1)", 10), ("f(1000)", 0), ("f(2)", 100)])
    assert passed(batch) == [True, False, True]
    assert batch.results[1].comparison_details.startswith("Raised ValueError: ")


def test_a_program_that_is_not_valid_did_not_compile(sandbox):
    batch = judge(sandbox, "x = 1\nf = lambda a: sum(a", CALLS)
    assert batch.compile_failed
    assert batch.results[0].execution.compile_result.error_line == 2


def test_after_a_failure_nothing_is_judged_if_so_wanted(sandbox):
    batch = judge(sandbox, "f = lambda a: a[0]", CALLS, stop=True)
    assert [result.execution.run_status for result in batch.results] == [RunStatus.SUCCESS, RunStatus.NOT_RUN, RunStatus.NOT_RUN]


def test_texts_run_before_and_after_the_program(sandbox):
    assert judge(
        sandbox, "f = lambda a: math.floor(a)", [("f(1.5)", 1), ("g(2.5)", 2)], before="import math", after="g = f"
    ).all_passed


def scripted(run):
    """A sandbox whose programs do what `run(calls, timeout_s)` says: a stdout and a status."""

    class Sandbox(Scripted):
        async def execute(self, code, *, stdin="", timeout_s, **limits):
            stdout, status = run(json.loads(stdin), timeout_s)
            return ExecutionResult(VALID, status, stdout=stdout, stderr="why\n", exit_code=0)

    return Sandbox()


def test_a_call_that_takes_too_long_takes_no_other_with_it():
    """Those before it keep their values; it is judged alone by its own limit, and those after it
    run again."""
    runs = []

    def run(calls, timeout_s):
        runs.append((calls, timeout_s))
        until = calls.index("f(0)") if "f(0)" in calls else len(calls)
        values = "".join(f'{{"value": {call[2]}}}\n' for call in calls[:until])
        return values, RunStatus.TIMEOUT if until < len(calls) else RunStatus.SUCCESS

    runner = FunctionCallRunner(5.0)
    cases = [TestCase("f(1)", 1), TestCase("f(3)", 4), TestCase("f(0)", 0, metadata={"timeout_s": 0.3}), TestCase("f(2)", 2)]
    batch = asyncio.run(runner.run_tests(scripted(run), "", cases, verifier=runner.default_verifier))
    assert passed(batch) == [True, False, False, True]
    assert batch.results[2].execution.run_status is RunStatus.TIMEOUT
    assert runs == [(["f(1)", "f(3)", "f(0)", "f(2)"], 5.0), (["f(0)", "f(2)"], 0.3), (["f(2)"], 5.0)]


def test_the_hash_of_tests_tells_a_list_from_a_tuple(sandbox):
    hashes = {judge(sandbox, "", [("f()", expected)]).tests_hash for expected in ([1], (1,), 1, "1")}
    assert len(hashes) == 4


ANSWER = '{"value": 8}\n'


@pytest.mark.parametrize(
    ("stdout", "verdicts"),
    [
        (ANSWER * 3, [True, False, False]),
        (ANSWER * 4, [False] * 3),  # more values than calls
        ("8\n", [False] * 3),
        ("not JSON\n", [False] * 3),
        ('{"value": 8, "more": 1}\n', [False] * 3),
        ('{"passed": true}\n', [False] * 3),
        ("[" * 100_000 + "\n", [False] * 3),
        ('{"value": 8}', [False] * 3),  # a line that was cut off
        ('{"value": ' + "9" * 5000 + "}\n", [False] * 3),
        ('{"value": 8}\n{"syntax_error": ["", 1, 1]}\n', [False] * 3),
    ],
)
def test_only_values_one_for_each_call_are_heard(stdout, verdicts):
    sandbox = scripted(lambda calls, timeout_s: (stdout if len(calls) == 3 else "", RunStatus.SUCCESS))
    assert passed(judge(sandbox, "f = 1", CALLS)) == verdicts


CASES = json.dumps([{"input": "[3, 1]", "output": "4", "testtype": "functional"}])
LEET_CODE = {
    "question_content": "Add.", "metadata": '{"func_name": "add"}', "public_test_cases": CASES,
    "starter_code": "class Solution:\n    def add(self, a: List[int]) -> Optional[int]:\n        ",
}  # fmt: skip
HUMAN_EVAL = {
    "prompt": "import math\ndef half(x):\n    return x / 2\n\ndef f(x):\n    '''Do nothing.'''\n", "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate(1) == None\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "code", "passes"),
    [
        (LEET_CODE, f"{LEET_CODE['starter_code']}return sum(Counter(a).elements())", True),
        (LEET_CODE, "def add(a: List[int]): return reduce(operator.add, a) if a else math.inf", True),
        ({**LEET_CODE, "metadata": '{"func_name": "prod"}', "public_test_cases": CASES.replace("4", "3")}, "# later", False),
        (HUMAN_EVAL, "def f(x):\n    half(math.floor(x))", True),
        (HUMAN_EVAL, "# later", False),
    ],
)
def test_the_prompt_gives_imports_but_not_the_function(sandbox, row, code, passes):
    problem = read_problem(row)
    runner = problem.make_runner(60.0, 256)
    batch = asyncio.run(runner.run_tests(sandbox, code, problem.tests, verifier=runner.default_verifier))
    assert passed(batch) == [passes]


HEIGHT = """
class Node:
    def __init__(self, value): self.value, self.left, self.right = value, None, None
def height(node): return 1 + max(height(node.left), height(node.right)) if node else 0
"""
TREE = {"prompt": "p", "test_list": ["assert height(root) == 2"], "test_setup_code": "root = Node(1)\nroot.left = Node(2)"}
OF_NODES = {
    "prompt": "p",
    "test_list": ["assert f(Node(3)) == 3"],
    "test_setup_code": "class Node:\n    def __init__(self, v): self.v = v",
}
POW = {"question": "q", "function": "pow", "inputs": [[2, 3]], "outputs": [8]}
SUM = {"prompt": "p", "test_list": ["assert sum(1, 2) == 3"]}


@pytest.mark.parametrize(
    ("row", "code", "passes"),
    [
        (TREE, HEIGHT, True),  # the setup uses the program's class
        (TREE, HEIGHT.replace("1 +", "2 +"), False),
        (TREE, "", False),
        (OF_NODES, "def f(node: Node): return node.v", True),  # the program uses the setup's, when it is defined
        (OF_NODES, "def g(node): return node.v", False),
        (POW, "", False),  # Python's own `pow` is no answer
        (POW, "def pow(a, b): return a ** b", True),
        (POW, "class Solution:\n    def pow(self, a, b): return a ** b", True),
        (SUM, "", False),
        (SUM, "def sum(a, b): return a + b", True),
        (SUM, "import builtins\nbuiltins.globals = lambda: {'sum': lambda a, b: 4}", False),
    ],
)
def test_the_program_alone_defines_what_is_tested(sandbox, row, code, passes):
    problem = read_problem(row)
    runner = problem.make_runner(60.0, 256)
    batch = asyncio.run(runner.run_tests(sandbox, code, problem.tests, verifier=runner.default_verifier))
    assert batch.all_passed is passes, batch


def test_a_sandbox_that_fails_gives_no_verdict():
    def run(calls, timeout_s):
        raise OSError("gone")

    batch = judge(scripted(run), "f = 1", CALLS)
    assert batch.sandbox_failed
    assert not batch.compile_failed


def test_an_environment_takes_the_runners_verifier():
    env = CodeExecEnv(
        {}, sandbox_pool=FakePool(1), test_adapter=_NoTests(), code_runner=FunctionCallRunner(), config=CodeExecConfig()
    )
    assert type(env._verifier).__name__ == "ValueVerifier"


class _NoTests:
    def get_tests(self, sample):
        return []

    def get_prompt(self, sample):
        return ""

    def get_problem_id(self, sample):
        return "p"

    def hash_tests(self, tests):
        return ""
