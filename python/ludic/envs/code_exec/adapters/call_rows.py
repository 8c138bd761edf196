"""Rows whose tests call a function: MBPP, HumanEval, and the part of APPS, TACO and LiveCodeBench
that is from LeetCode."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ludic.envs.code_exec.adapters.asserts import read_asserts, read_check_function, read_imports
from ludic.envs.code_exec.adapters.needs import need_the_program, own_function
from ludic.envs.code_exec.adapters.problem import CodingProblem
from ludic.envs.code_exec.adapters.stdin_rows import LIVE_CODE_BENCH, live_code_bench_tests, parse_column, zip_tests
from ludic.envs.code_exec.calls.values import OneOf
from ludic.envs.code_exec.types import TestCase
from ludic.errors import DataError

USUAL_IMPORTS = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, typing
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, perm, pi, prod, sqrt
from typing import *
"""
"""What LeetCode imports before a program; its starters need `List`."""


def read_call_tests(row: Mapping[str, Any], problem: CodingProblem) -> CodingProblem | None:
    """The problem with its tests, and with the function's name in its prompt; None if the tests of
    the row call no function."""
    if row.get("test_list"):
        return _read_mbpp(row, problem)
    if row.get("test") and row.get("entry_point"):
        return _read_human_eval(row, problem)
    tests = parse_tests(row["tests"]) if row.get("tests") else []
    if tests and all(isinstance(test, str) for test in tests):
        before = _join([*map(read_imports, tests), str(row.get("before") or "")])
        return _with_asserts(problem, _number(tests), before)
    return _read_json_calls(row, problem)


def parse_tests(value: Any) -> Sequence[Any]:
    """A list of tests; a text that is no JSON is one source of asserts."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return [value]
    tests = parse_column(value, "tests")
    return tests if isinstance(tests, list) else [tests]


def _join(texts: Sequence[str]) -> str:
    return "\n".join(filter(None, texts)).strip()


def _with_asserts(problem: CodingProblem, tests: Sequence[TestCase], before: str, after: str = "") -> CodingProblem:
    try:
        needed = need_the_program(tests, f"{before}\n{after}")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"what runs before or after the program is not Python: {error}") from error
    return replace(problem, tests=needed, calls=True, before=before, after=after)


def _number(sources: Sequence[str]) -> list[TestCase]:
    tests = [test for source in sources for test in read_asserts(source)]
    return [replace(test, id=f"test_{place}") for place, test in enumerate(tests)]


def _read_mbpp(row: Mapping[str, Any], problem: CodingProblem) -> CodingProblem:
    """The first assert is shown, because it alone names the function; `challenge_test_list` counts
    too. The setup runs before the program, which may name its classes, and again after it, because
    it may use the program's; what the tests need of the program it may not define."""
    sources = [*row["test_list"], *(row.get("challenge_test_list") or [])]
    imports = row.get("test_imports") or []
    setup = str(row.get("test_setup_code") or "")
    before = _join([*imports, *map(read_imports, sources), _as_far_as_it_goes(setup)])
    shown = f"{problem.prompt}\n\nThe program must pass this test, and others:\n{row['test_list'][0]}"
    return _with_asserts(replace(problem, prompt=shown), _number(sources), before, setup)


def _as_far_as_it_goes(source: str) -> str:
    """Python that runs the source up to where it fails: it may need the program's classes."""
    return f"try:\n    exec({source!r}, globals())\nexcept Exception:\n    pass" if source.strip() else ""


def _read_human_eval(row: Mapping[str, Any], problem: CodingProblem) -> CodingProblem:
    """The prompt's imports and other functions run before the program; the program is the whole
    function, of which nothing is defined before."""
    tests = read_check_function(row["test"], entry_point=row["entry_point"])
    shown = f"Complete this function. Write all of it, with its imports:\n\n```python\n{problem.prompt.rstrip()}\n```"
    before = _without_function(problem.prompt, row["entry_point"]) + read_imports(row["test"])
    needed = need_the_program(tests, before, functions=[row["entry_point"]])
    return replace(problem, prompt=shown, tests=needed, calls=True, before=before)


def _without_function(prompt: str, name: str) -> str:
    """The Python of a prompt that ends in a function without its body, but for that function.

    Example: `import math`, then `def f(x):`, gives `import math` for the name `f`.
    """
    try:
        statements = ast.parse(f"{prompt.rstrip()}\n    pass\n").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise DataError(f"the prompt must be Python that ends in a function without its body: {error}") from error
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    kept = [part for part in statements if not (isinstance(part, functions) and part.name == name)]
    return f"{ast.unparse(ast.Module(body=kept, type_ignores=[]))}\n"


def _read_json_calls(row: Mapping[str, Any], problem: CodingProblem) -> CodingProblem | None:
    name, pairs = _named_calls(row)
    if name is None:
        return None
    if not name.isidentifier():
        raise DataError(f"the function's name ({name!r}) must be one of Python's")
    calls = f"(Solution().{name} if 'Solution' in globals() else {own_function(name)})"
    tests = [
        TestCase(f"{calls}(*{_literal(arguments)})", expected, id=f"test_{place}")
        for place, (arguments, expected) in enumerate(pairs)
    ]
    starter = str(row.get("starter_code") or "").strip()
    shown = f"Begin with:\n```python\n{starter}\n```" if starter else f"Write a function `{name}`."
    prompt, before = f"{problem.prompt}\n\n{shown}", f"{USUAL_IMPORTS}globals().pop({name!r}, None)\n"
    return replace(problem, prompt=prompt, tests=tests, calls=True, before=before, tuples_are_lists=True)


def _named_calls(row: Mapping[str, Any]) -> tuple[str | None, list[tuple[list[Any], Any]]]:
    """(name of the function or None, pairs of its arguments and what is expected)."""
    if row.get("input_output"):
        tests = parse_column(row["input_output"], "input_output")
        name = tests.get("fn_name") if isinstance(tests, Mapping) else None
        return name, [(given, _in_a_list(wanted)) for given, wanted in zip_tests(tests, "inputs", "outputs")] if name else []
    if any(row.get(column) for column in LIVE_CODE_BENCH):
        tests = live_code_bench_tests(row)
        if not tests or tests[0].get("testtype") != "functional":
            return None, []
        name = parse_column(row.get("metadata") or "{}", "metadata").get("func_name")
        if not name:
            raise DataError("the tests call a function, whose name must be `func_name` in the column 'metadata'")
        lines = [[parse_column(line, "input") for line in str(test["input"]).split("\n") if line] for test in tests]
        return name, [(given, parse_column(test["output"], "output")) for given, test in zip(lines, tests, strict=True)]
    name = row.get("fn_name") or row.get("function")
    return name, zip_tests(row, "inputs", "outputs") if name else []


def _in_a_list(expected: Any) -> Any:
    """Some outputs of APPS are the value, others the value in a list of its own."""
    return OneOf((expected, expected[0])) if isinstance(expected, list) and len(expected) == 1 else expected


def _literal(arguments: Any) -> str:
    """JSON as Python writes it: null is None."""
    if not isinstance(arguments, list):
        raise DataError(f"the arguments of a call must be a list, got {json.dumps(arguments):.80}")
    return repr(arguments)
