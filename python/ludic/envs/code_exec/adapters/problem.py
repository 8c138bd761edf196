"""Reads problems of any of the data sets that are known, by their columns, as one type.

Their tests run a program that reads stdin and writes stdout (APPS, TACO, CodeContests,
LiveCodeBench), or call a function of it (MBPP, HumanEval, and the part of APPS, TACO and
LiveCodeBench that is from LeetCode).
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludic.envs.code_exec.adapters.asserts import (
    must_be_python,
    need_the_program,
    own_function,
    read_asserts,
    read_check_function,
    read_imports,
)
from ludic.envs.code_exec.calls import FunctionCallRunner, OneOf, ValueVerifier
from ludic.envs.code_exec.runners import CodeRunner, StdinStdoutRunner
from ludic.envs.code_exec.types import TestCase, hash_calls
from ludic.errors import DataError, DataKeyError


@dataclass(frozen=True)
class CodingProblem:
    """One problem. Example: `CodingProblem("7", "Double it.", [TestCase("2", "4", id="test_0")])`
    is what `{"id": 7, "question": "Double it.", "inputs": ["2"], "outputs": ["4"]}` says."""

    id: str
    prompt: str
    tests: Sequence[TestCase]
    calls: bool = False
    """Each test is the call of a function, not a run of the whole program."""
    before: str = ""
    """Python that runs before the program, such as imports. With `calls` only."""
    after: str = ""
    """Python that runs after the program and before the calls, such as objects of its classes."""
    tuples_are_lists: bool = False
    """The expected value comes from JSON, which has lists alone."""
    solutions: Sequence[str] = field(default=(), repr=False)

    def make_runner(self, timeout_s: float, memory_limit_mb: int) -> CodeRunner:
        """The runner for its tests, with the limits of tests that have none."""
        if not self.calls:
            return StdinStdoutRunner(timeout_s, memory_limit_mb)
        verifier = ValueVerifier(tuples_are_lists=self.tuples_are_lists)
        return FunctionCallRunner(timeout_s, memory_limit_mb, before=self.before, after=self.after, verifier=verifier)


_AMOUNT = re.compile(r"\s*([0-9.]+)\s*([a-z]*)\s*")
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "milliseconds": 1e-3}
_MEGABYTES = {"": 1.0, "mb": 1.0, "mib": 1.0, "megabyte": 1.0, "megabytes": 1.0, "gb": 1024.0, "gigabytes": 1024.0, "kb": 1 / 1024,
              "kilobytes": 1 / 1024, "bytes": 2.0**-20}  # fmt: skip


def read_limits(row: Mapping[str, Any]) -> dict[str, float]:
    """`timeout_s` and `memory_limit_mb`, as a test's metadata has them, of the columns that say so.

    Example: `{"time_limit": "2.0 seconds", "memory_limit_bytes": 268435456}` gives
    `{"timeout_s": 2.0, "memory_limit_mb": 256.0}`.
    """
    limits = {}
    for name in ("timeout_s", "time_limit_s", "time_limit"):
        if (value := row.get(name)) not in (None, ""):
            limits["timeout_s"] = _amount(name, value, _SECONDS)
            break
    for name, factor in (("memory_limit_mb", 1.0), ("memory_limit_bytes", 2.0**-20), ("memory_limit", 1.0)):
        if (value := row.get(name)) not in (None, "", 0):
            limits["memory_limit_mb"] = factor * _amount(name, value, _MEGABYTES)
            break
    return limits


def _amount(name: str, value: Any, units: Mapping[str, float]) -> float:
    if isinstance(value, Mapping) and isinstance(value.get("seconds"), int):  # as CodeContests has it
        value = value["seconds"] + (value.get("nanos") or 0) * 1e-9
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    match = _AMOUNT.fullmatch(value.lower()) if isinstance(value, str) else None
    try:
        amount = float(match[1]) * units[match[2]] if match else 0.0
    except (KeyError, ValueError):
        amount = 0.0
    if amount <= 0:
        raise DataError(f"{name} ({value!r}) must be a number above 0, or one with its unit, such as '256 megabytes'")
    return amount


CODE_CONTESTS = ("public_tests", "private_tests", "generated_tests")
LIVE_CODE_BENCH = ("public_test_cases", "private_test_cases")
MOST_BYTES = 1 << 30
"""Of tests that are unpacked."""
_PASSIVE = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def read_stdin_tests(row: Mapping[str, Any]) -> list[TestCase]:
    """The tests of a row, in the order of its columns: none if it has no such columns."""
    pairs = list(_pairs(row))
    return [TestCase(_text(given), _text(wanted), id=f"test_{place}") for place, (given, wanted) in enumerate(pairs)]


def _pairs(row: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    if row.get("input_output"):
        tests = parse_column(row["input_output"], "input_output")
        yield from zip_tests(tests, "inputs", "outputs")
    elif row.get("inputs") is not None:
        yield from zip_tests(row, "inputs", "outputs")
    elif any(row.get(name) for name in CODE_CONTESTS):
        for name in CODE_CONTESTS:
            if row.get(name):
                yield from zip_tests(parse_column(row[name], name), "input", "output")
    elif any(row.get(name) for name in LIVE_CODE_BENCH):
        yield from ((test["input"], test["output"]) for test in live_code_bench_tests(row))
    elif row.get("tests"):
        yield from ((test["input"], test["output"]) for test in _parse_tests(row["tests"], "tests"))


def zip_tests(tests: Any, given: str, wanted: str) -> list[tuple[Any, Any]]:
    """Pairs of the two columns, which must be as long."""
    if not isinstance(tests, Mapping) or not isinstance(tests.get(given), list) or not isinstance(tests.get(wanted), list):
        raise DataError(f"tests need two lists, {given!r} and {wanted!r}, got {tests!r:.80}")
    if len(tests[given]) != len(tests[wanted]):
        raise DataError(f"tests must have as many {given!r} ({len(tests[given])}) as {wanted!r} ({len(tests[wanted])})")
    return list(zip(tests[given], tests[wanted], strict=True))


def parse_column(value: Any, name: str) -> Any:
    """The value, or what its JSON says if it is text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the column {name!r} is not JSON: {error}") from error


def live_code_bench_tests(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The shown tests, then the hidden ones."""
    found: list[Mapping[str, Any]] = []
    for name in LIVE_CODE_BENCH:
        value = row.get(name)
        if isinstance(value, str) and not value.lstrip().startswith("["):
            value = unpack_text(value, name)
        found += _parse_tests(value or [], name)
    return found


def _parse_tests(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    tests: Sequence[Mapping[str, Any]] = parse_column(value, name)
    if not isinstance(tests, Sequence) or not all(
        isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests
    ):
        raise DataError(f"the column {name!r} must be a list of tests with `input` and `output`, got {tests!r:.80}")
    return tests


def unpack_text(packed: str, name: str) -> str:
    """The text in base64 of zlib of a pickled text, as LiveCodeBench has its hidden tests. The
    pickle is not run: its parts are listed, and it must be one text alone."""
    try:
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(base64.b64decode(packed, validate=True), MOST_BYTES)
        parts = [(code.name, argument) for code, argument, _ in pickletools.genops(pickled)]
    except (binascii.Error, zlib.error, ValueError, EOFError, UnicodeError) as error:
        raise DataError(f"the column {name!r} is neither JSON nor packed tests: {error}") from error
    texts = [argument for code, argument in parts if code not in _PASSIVE]
    codes = [code for code, _ in parts if code not in _PASSIVE]
    if len(codes) != 1 or "UNICODE" not in codes[0] or unpacker.unconsumed_tail:
        raise DataError(f"the column {name!r} must be one packed text; pickles of anything else are not read")
    return str(texts[0])


def _text(value: Any) -> str:
    """Lines that are a list are joined, as APPS has some."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(map(str, value))
    return str(value)


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
    with must_be_python("what runs before or after the program is"):
        needed = need_the_program(tests, f"{before}\n{after}")
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
    # The setup runs as far as it goes: it may need the program's classes.
    tried = f"try:\n    exec({setup!r}, globals())\nexcept Exception:\n    pass" if setup.strip() else ""
    before = _join([*imports, *map(read_imports, sources), tried])
    shown = f"{problem.prompt}\n\nThe program must pass this test, and others:\n{row['test_list'][0]}"
    return _with_asserts(replace(problem, prompt=shown), _number(sources), before, setup)


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
    with must_be_python("the prompt, which must end in a function without its body, is"):
        statements = ast.parse(f"{prompt.rstrip()}\n    pass\n").body
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
    """(name of the function or None, pairs of its arguments and the expected value)."""
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


PROMPT_COLUMNS = ("question", "prompt", "problem", "description", "question_content", "text", "instruction")
ID_COLUMNS = ("problem_id", "task_id", "question_id", "id", "name")


def read_problem(row: Mapping[str, Any], *, prompt_column: str | None = None) -> CodingProblem:
    """The problem of a row of APPS, TACO, CodeContests, LiveCodeBench, MBPP, HumanEval, or with
    columns of your own (docs/code.md has them). DataError, with the reason, for a row without
    tests, or with tests that cannot be judged outside the sandbox."""
    name = str(next((row[key] for key in ID_COLUMNS if row.get(key) is not None), "unknown"))
    columns = PROMPT_COLUMNS if prompt_column is None else (prompt_column,)
    prompt = next((str(row[key]) for key in columns if row.get(key)), None)
    if prompt is None:
        raise DataKeyError(f"the problem has no {' or '.join(map(repr, columns))}; it has {sorted(row)}")
    problem = read_call_tests(row, CodingProblem(name, prompt, ()))
    if problem is None:
        problem = CodingProblem(name, prompt, read_stdin_tests(row))
    if not problem.tests:
        raise DataError(f"problem {name} has no tests; it has the columns {', '.join(sorted(row))}")
    limits = read_limits(row)
    tests = [replace(test, metadata={**limits, **test.metadata}) for test in problem.tests]
    found = next((row[key] for key in ("solutions", "canonical_solution", "code") if row.get(key)), ())
    solutions = (found,) if isinstance(found, str) else tuple(map(str, found)) if isinstance(found, list) else ()
    return replace(problem, tests=tests, solutions=solutions)


class CodingProblemAdapter:
    """The TestAdapter of all these data sets. `FunctionCallRunner` or `StdinStdoutRunner`:
    `read_problem(row).make_runner(...)`."""

    def __init__(self, *, prompt_column: str | None = None) -> None:
        self._prompt_column = prompt_column

    def get_tests(self, sample: Mapping[str, Any]) -> list[TestCase]:
        return list(self._read(sample).tests)

    def get_prompt(self, sample: Mapping[str, Any]) -> str:
        return self._read(sample).prompt

    def get_problem_id(self, sample: Mapping[str, Any]) -> str:
        return self._read(sample).id

    def hash_tests(self, tests: Sequence[TestCase]) -> str:
        return hash_calls(tests)

    def get_reference_solution(self, sample: Mapping[str, Any]) -> str | None:
        return next(iter(self._read(sample).solutions), None)

    def _read(self, sample: Mapping[str, Any]) -> CodingProblem:
        return read_problem(sample, prompt_column=self._prompt_column)


class OneProblem(CodingProblemAdapter):
    """The TestAdapter of a problem that is read already, for any sample."""

    def __init__(self, problem: CodingProblem) -> None:
        self._problem = problem

    def _read(self, sample: Mapping[str, Any]) -> CodingProblem:
        return self._problem
