"""GSM8K and MATH as reward functions: 1 for a right answer, 0 for a wrong one, and a GradingError
instead of a number for an answer without a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludic.envs.maths.answers import final_answer, first_present, gsm8k_target, math_target
from ludic.envs.maths.envs import GSM8K_SYSTEM_PROMPT, MATH_SYSTEM_PROMPT
from ludic.envs.maths.grader import MathGrader, shared_grader
from ludic.errors import GradingError


class MathReward:
    """Compares each completion with the target of its row, concurrently."""

    def __init__(
        self, name: str, keys: Sequence[str], target: Callable[[str], str], system_prompt: str, grader: MathGrader | None = None
    ) -> None:
        self.__name__ = name
        self.system_prompt = system_prompt
        """The system prompt for prompts without one."""
        self._keys, self._target, self._grader = tuple(keys), target, grader

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError for a row without a target."""
        self.target_of(row)

    def target_of(self, row: Mapping[str, Any]) -> str:
        return self._target(first_present(row, *self._keys))

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | GradingError]:
        """Columns are those of the data set; completions are text or messages."""
        grader = self._grader or shared_grader()
        rows = [{key: columns[key][index] for key in self._keys if key in columns} for index in range(len(completions))]
        verdicts = await asyncio.gather(
            *(grader.grade(final_answer(_text(c)), self.target_of(row)) for c, row in zip(completions, rows, strict=True)),
            return_exceptions=True,
        )
        for verdict in verdicts:
            if isinstance(verdict, BaseException) and not isinstance(verdict, GradingError):
                raise verdict
        return [verdict if isinstance(verdict, GradingError) else float(bool(verdict)) for verdict in verdicts]


def gsm8k_reward(grader: MathGrader | None = None) -> MathReward:
    """The number after `####` of the column `answer`."""
    return MathReward("gsm8k", ["answer"], gsm8k_target, GSM8K_SYSTEM_PROMPT, grader)


def math_reward(grader: MathGrader | None = None) -> MathReward:
    r"""The last `\boxed{...}` of the column `solution` or `answer`, or its whole text."""
    return MathReward("math", ["solution", "answer"], math_target, MATH_SYSTEM_PROMPT, grader)


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
