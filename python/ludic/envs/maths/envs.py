"""GSM8K and MATH as environments and as reward functions: one problem, one answer, compared by
math-verify. A reward is 1 for a right answer, 0 for a wrong one, and a GradingError instead of a
number for an answer without a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludic.envs.dataset_qa_env import DatasetQAEnv, ParserFn, Sample
from ludic.envs.maths.grader import (
    MathGrader,
    completion_text,
    final_answer,
    first_present,
    gsm8k_target,
    math_target,
    shared_grader,
)
from ludic.errors import GradingError
from ludic.types import StepOutcome

GSM8K_SYSTEM_PROMPT = "Solve the problem step by step. Put the final number in \\boxed{}."
MATH_SYSTEM_PROMPT = "Solve the problem step by step. Put the final answer in \\boxed{}."


class MathQAEnv(DatasetQAEnv):
    """A question with an expression as answer. The model may answer with a longer text (see
    `final_answer`).

    If the grader fails or takes too long, GradingError is raised: the episode fails and has no
    reward.
    """

    def __init__(
        self,
        sample: Sample,
        *,
        prompt_key: str,
        answer_key: str,
        target_parser: ParserFn,
        system_prompt: str | None,
        grader: MathGrader | None = None,
        correct_reward: float = 1.0,
        incorrect_reward: float = 0.0,
    ) -> None:
        super().__init__(
            sample,
            prompt_key=prompt_key,
            answer_key=answer_key,
            system_prompt=system_prompt,
            target_parser=target_parser,
            correct_reward=correct_reward,
            incorrect_reward=incorrect_reward,
        )
        self._grader = grader or shared_grader()

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]  # the protocol awaits it
        target = self.begin_verdict()
        return self.end_verdict(action, target, correct=await self._grader.grade(final_answer(action), target))


class GSM8KEnv(MathQAEnv):
    """A row of GSM8K: `question`, and `answer`, whose target is the last number after `####`."""

    def __init__(
        self,
        sample: Sample,
        *,
        system_prompt: str | None = GSM8K_SYSTEM_PROMPT,
        grader: MathGrader | None = None,
        correct_reward: float = 1.0,
        incorrect_reward: float = 0.0,
    ) -> None:
        super().__init__(
            sample,
            prompt_key="question",
            answer_key="answer",
            target_parser=gsm8k_target,
            system_prompt=system_prompt,
            grader=grader,
            correct_reward=correct_reward,
            incorrect_reward=incorrect_reward,
        )


class MATHEnv(MathQAEnv):
    r"""A row of MATH: `problem` or `question`, and `solution` or `answer`, whose target is the
    last `\boxed{...}`."""

    def __init__(
        self,
        sample: Sample,
        *,
        system_prompt: str | None = MATH_SYSTEM_PROMPT,
        grader: MathGrader | None = None,
        correct_reward: float = 1.0,
        incorrect_reward: float = 0.0,
    ) -> None:
        first_present(sample, "problem", "question"), first_present(sample, "solution", "answer")
        super().__init__(
            sample,
            prompt_key="problem" if sample.get("problem") is not None else "question",
            answer_key="solution" if sample.get("solution") is not None else "answer",
            target_parser=math_target,
            system_prompt=system_prompt,
            grader=grader,
            correct_reward=correct_reward,
            incorrect_reward=incorrect_reward,
        )


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

    def _rows(self, count: int, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The columns of the target, row by row."""
        return [{key: columns[key][index] for key in self._keys if key in columns} for index in range(count)]

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | GradingError]:
        """Columns come from the data set; completions are text or messages."""
        grader, rows = self._grader or shared_grader(), self._rows(len(completions), columns)
        verdicts = await asyncio.gather(
            *(
                grader.grade(final_answer(completion_text(c)), self.target_of(row))
                for c, row in zip(completions, rows, strict=True)
            ),
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
