"""The protocols of data sets of problems and of verifiers, the data set APPS, and the verifiers.

A verifier compares the output of a program with the expected output, outside the sandbox.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ludic.envs.code_exec.types import TestCase, compute_hash
from ludic.errors import DataError, DataKeyError

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE | re.ASCII)
"""As programs print numbers; `float` also reads `4_2` and the digits of all scripts."""


@runtime_checkable
class TestAdapter(Protocol):
    """Reads the rows of one data set of problems."""

    def get_tests(self, sample: Mapping[str, Any]) -> list[TestCase]: ...

    def get_prompt(self, sample: Mapping[str, Any]) -> str: ...

    def get_problem_id(self, sample: Mapping[str, Any]) -> str: ...

    def hash_tests(self, tests: Sequence[TestCase]) -> str:
        """Part of the key under which results are kept."""


@runtime_checkable
class OutputVerifier(Protocol):
    """Compares an output with the expected one."""

    def verify(self, actual: Any, expected: Any) -> tuple[bool, str | None]:
        """Whether they agree, and if not, how they differ."""


class ExactMatchVerifier:
    """The same text; white space at both ends is ignored unless `strip` is False."""

    def __init__(self, *, strip: bool = True, case_sensitive: bool = True) -> None:
        self._strip, self._case_sensitive = strip, case_sensitive

    def verify(self, actual: Any, expected: Any) -> tuple[bool, str | None]:
        got, wanted = self._normalize(actual), self._normalize(expected)
        if got == wanted:
            return True, None
        if len(got) != len(wanted):
            return False, f"Length mismatch: {len(got)} characters instead of {len(wanted)}"
        place = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
        return False, f"First diff at character {place}: {got[place]!r} instead of {wanted[place]!r}"

    def _normalize(self, text: Any) -> str:
        text = str(text).strip() if self._strip else str(text)
        return text if self._case_sensitive else text.lower()


class WhitespaceNormalizedVerifier:
    """The same words on any lines: each run of white space counts as one space."""

    def verify(self, actual: Any, expected: Any) -> tuple[bool, str | None]:
        return ExactMatchVerifier().verify(" ".join(str(actual).split()), " ".join(str(expected).split()))


class FloatTolerantVerifier:
    """The same words; two words that are finite numbers may differ by max(`abs_tol`, `rel_tol` x
    |expected|)."""

    def __init__(self, *, abs_tol: float = 1e-9, rel_tol: float = 1e-9, strip: bool = True) -> None:
        self._abs_tol, self._rel_tol, self._strip = abs_tol, rel_tol, strip

    def verify(self, actual: Any, expected: Any) -> tuple[bool, str | None]:
        got, wanted = self._words(actual), self._words(expected)
        if len(got) != len(wanted):
            return False, f"Token count mismatch: {len(got)} instead of {len(wanted)}"
        for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
            if one != other and not self._close(one, other):
                return False, f"Token {place} differs: {one!r} instead of {other!r}"
        return True, None

    def _words(self, text: Any) -> list[str]:
        return str(text).split() if self._strip else str(text).split(" ")

    def _close(self, actual: str, expected: str) -> bool:
        if not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)):
            return False
        got, wanted = float(actual), float(expected)
        if not (math.isfinite(got) and math.isfinite(wanted)):
            return got == wanted
        return abs(got - wanted) <= max(self._abs_tol, self._rel_tol * abs(wanted))


APPS_SYSTEM_PROMPT = (
    "You solve programming problems in Python. Your program reads its input from stdin and prints its answer to stdout. "
    "Think first, then write the whole program in one ```python block, which must be the last one of your answer."
)


class APPSTestAdapter:
    """Rows with a question, a list of inputs and a list of outputs of the same length.

    `solutions` of a row, if there are any, are right programs, and `is_nondeterministic`, if true,
    says that several outputs are right.
    """

    def __init__(
        self,
        *,
        question_key: str = "question",
        inputs_key: str = "inputs",
        outputs_key: str = "outputs",
        problem_id_key: str = "problem_id",
    ) -> None:
        self._question_key, self._inputs_key, self._outputs_key = question_key, inputs_key, outputs_key
        self._problem_id_key = problem_id_key

    def get_tests(self, sample: Mapping[str, Any]) -> list[TestCase]:
        """Tests `test_0`, `test_1` ...; DataError unless there are as many inputs as outputs."""
        inputs, outputs = self._column(sample, self._inputs_key), self._column(sample, self._outputs_key)
        if len(inputs) != len(outputs):
            pair = f"{self._inputs_key!r} ({len(inputs)}) as {self._outputs_key!r} ({len(outputs)})"
            raise DataError(f"problem {self.get_problem_id(sample)} must have as many {pair}")
        return [TestCase(one, other, id=f"test_{i}") for i, (one, other) in enumerate(zip(inputs, outputs, strict=True))]

    def get_prompt(self, sample: Mapping[str, Any]) -> str:
        return str(self._column(sample, self._question_key))

    def get_problem_id(self, sample: Mapping[str, Any]) -> str:
        return str(sample.get(self._problem_id_key, "unknown"))

    def hash_tests(self, tests: Sequence[TestCase]) -> str:
        return compute_hash(str([(test.input, test.expected) for test in tests]))

    def get_reference_solution(self, sample: Mapping[str, Any]) -> str | None:
        """The first right program of the row, if it has one."""
        solutions = sample.get("solutions")
        if isinstance(solutions, str):
            return solutions or None
        return str(solutions[0]) if solutions else None

    def is_valid_for_sneaky(self, sample: Mapping[str, Any]) -> bool:
        """Whether the row has tests, one right output for each, and a right program."""
        has_tests = bool(sample.get(self._inputs_key)) and not sample.get("is_nondeterministic", False)
        return has_tests and self.get_reference_solution(sample) is not None

    @staticmethod
    def _column(sample: Mapping[str, Any], key: str) -> Any:
        if key not in sample:
            raise DataKeyError(f"the problem has no {key!r}; it has {sorted(sample)}")
        return sample[key]
