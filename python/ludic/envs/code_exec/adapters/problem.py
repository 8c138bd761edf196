"""A problem of any of the data sets, as one type; its limits and, if its program reads stdin and
writes stdout, its tests: the columns of APPS, TACO, CodeContests, LiveCodeBench."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.envs.code_exec.cache import hash_calls
from ludic.envs.code_exec.calls import FunctionCallRunner, ValueVerifier
from ludic.envs.code_exec.runners import CodeRunner, StdinStdoutRunner
from ludic.envs.code_exec.types import TestCase
from ludic.errors import DataError


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


class OneProblem:
    """The TestAdapter of a problem that is read already, for any sample."""

    def __init__(self, problem: CodingProblem) -> None:
        self._problem = problem

    def get_tests(self, sample: Mapping[str, Any]) -> list[TestCase]:
        return list(self._problem.tests)

    def get_prompt(self, sample: Mapping[str, Any]) -> str:
        return self._problem.prompt

    def get_problem_id(self, sample: Mapping[str, Any]) -> str:
        return self._problem.id

    def hash_tests(self, tests: Sequence[TestCase]) -> str:
        return hash_calls(tests)


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
        raise DataError(
            f"{name} ({value!r}) must be a number above 0, or one with its unit, such as '2 seconds' or '256 megabytes'"
        )
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
        for place, test in enumerate(parse_column(row["tests"], "tests")):
            if not isinstance(test, Mapping) or not {"input", "output"} <= set(test):
                raise DataError(f"tests[{place}] must be an object with `input` and `output`, or an assert, got {test!r:.80}")
            yield test["input"], test["output"]


def zip_tests(tests: Any, given: str, wanted: str) -> list[tuple[Any, Any]]:
    """Pairs of the two columns, which must be as long."""
    if not isinstance(tests, Mapping) or not isinstance(tests.get(given), list) or not isinstance(tests.get(wanted), list):
        raise DataError(f"tests need two lists, {given!r} and {wanted!r}, got {tests!r:.80}")
    if len(tests[given]) != len(tests[wanted]):
        raise DataError(
            f"Mismatched tests: {len(tests[given])} in {given!r}, {len(tests[wanted])} in {wanted!r}; each input needs its output"
        )
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
    found = []
    for name in LIVE_CODE_BENCH:
        value = row.get(name)
        if isinstance(value, str) and not value.lstrip().startswith("["):
            value = unpack_text(value, name)
        tests = parse_column(value or [], name)
        if not isinstance(tests, list) or not all(
            isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests
        ):
            raise DataError(f"the column {name!r} must be a list of tests with `input` and `output`, got {tests!r:.80}")
        found += tests
    return found


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
