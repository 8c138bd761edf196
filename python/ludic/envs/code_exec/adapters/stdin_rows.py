"""Rows whose programs read stdin and write stdout: APPS, TACO, CodeContests, LiveCodeBench."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ludic.envs.code_exec.types import TestCase
from ludic.errors import DataError

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
