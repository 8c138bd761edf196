"""Problems in the columns of APPS: a question, inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.envs.code_exec.cache import compute_hash
from ludic.envs.code_exec.types import TestCase
from ludic.errors import DataError, DataKeyError

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
            raise DataError(
                f"Mismatched tests in problem {self.get_problem_id(sample)}: {len(inputs)} in {self._inputs_key!r}, "
                f"{len(outputs)} in {self._outputs_key!r}; each input needs its output"
            )
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
