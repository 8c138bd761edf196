"""GSM8K and MATH: the grader, which compares answers by math-verify in separate processes with a
deadline, and the environments and reward functions that use it. A reward is 1 for a right answer, 0
for a wrong one, and a GradingError instead of a number for an answer without a verdict.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ludic.envs.dataset_qa_env import DatasetQAEnv, ParserFn, Sample
from ludic.envs.line_process import GraderCounts as GraderCounts, LineProcessPool, gather_verdicts
from ludic.errors import DataError, GradingError, MissingExtraError
from ludic.parsers import extract_last_boxed_content
from ludic.types import StepOutcome

WORKER = Path(__file__).with_name("worker.py")


class MathGrader(LineProcessPool):
    """Compares answers with targets by math-verify: `0.5` is `\\frac{1}{2}`, `x^2+2x+1` is
    `(x+1)^2`.

    Comparisons run in `workers` processes (None means one for each core, at most 8), which start at
    the first use. A comparison that takes longer than `timeout_s` is killed with its process. This
    and every other failure raises GradingError and is counted in `counts`; it is never a verdict.
    `memory_mb` limits the address space of each process. `command` replaces the worker by another
    program with the same protocol.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        workers: int | None = None,
        memory_mb: int = 4096,
        start_timeout_s: float = 60.0,
        command: Sequence[str] | None = None,
    ) -> None:
        if command is None and find_spec("math_verify") is None:
            raise MissingExtraError.for_extra("math-verify", "math")
        command = command or [sys.executable, "-P", str(WORKER), str(memory_mb)]
        super().__init__(command, timeout_s=timeout_s, workers=workers, start_timeout_s=start_timeout_s)

    async def grade(self, answer: str, target: str) -> bool:
        """Whether `answer`, or the expression in it, equals `target`, an expression in LaTeX or
        plain notation.

        Raises GradingError. The deadline starts when a process is free.
        """
        return await self.run_in_thread(self.grade_now, answer, target)

    def grade_now(self, answer: str, target: str) -> bool:
        """The same for synchronous code."""
        compared = f"{_shown(answer)} against {_shown(target)}"
        reply = self.ask({"target": target, "answer": answer, "limit_s": 2 * self.timeout_s + 1}, f"grading {compared}")
        return bool(self.check(reply, "correct", bool, f"grading {compared}"))


@cache
def shared_grader() -> MathGrader:
    """The default grader of environments and rewards."""
    return MathGrader()


def _shown(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else f"{text[:limit]}...")


READ_AT_MOST = 2_000
"""How many characters at the end of an answer without a box are searched for an expression. The
time of the search grows faster than the length."""

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_THOUGHT_ENDS = re.compile(r"</think>", re.IGNORECASE)


def gsm8k_target(solution: str) -> str:
    """The last number after `####`, without commas. `gsm8k_target("6*7=42\\n#### 1,042") ==
    "1042"`."""
    _, mark, final = solution.rpartition("####")
    numbers = NUMBER.findall(final) if mark else []
    if not numbers:
        raise DataError(f"the solution {solution[-80:]!r} has no number after ####")
    return str(numbers[-1].replace(",", ""))


def math_target(solution: str) -> str:
    r"""The content of the last `\boxed{...}`, or the whole text without a box: MATH-500 has the
    bare answer in a column."""
    boxed = extract_last_boxed_content(solution)
    target = (solution if boxed is None else boxed).strip()
    if not target:
        raise DataError(f"the solution {solution[-80:]!r} has no answer")
    return target


def final_answer(text: str) -> str:
    r"""The part of a model's text to compare: after `</think>` if there is one, the last
    `\boxed{...}`; without a box what follows the last `####`, or the last 2,000 characters, in
    which math-verify looks for the last expression."""
    answer = _THOUGHT_ENDS.split(text)[-1]
    boxed = extract_last_boxed_content(answer)
    if boxed is not None:
        return f"\\boxed{{{boxed}}}"
    return answer.rpartition("####")[2][-READ_AT_MOST:]


def first_present(row: Mapping[str, Any], *keys: str) -> str:
    """The text of the first of these columns that is not None."""
    for key in keys:
        if row.get(key) is not None:
            return str(row[key])
    raise DataError(f"a row needs {' or '.join(keys)}; it has {', '.join(sorted(row))}")


def completion_text(completion: Any) -> str:
    """The text of a completion, or the content of the last of its messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


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
    r"""A row of MATH: `problem` or `question`, and `answer` or `solution`, whose target is the
    last `\boxed{...}`, or the whole text."""

    def __init__(
        self,
        sample: Sample,
        *,
        system_prompt: str | None = MATH_SYSTEM_PROMPT,
        grader: MathGrader | None = None,
        correct_reward: float = 1.0,
        incorrect_reward: float = 0.0,
    ) -> None:
        first_present(sample, "problem", "question"), first_present(sample, "answer", "solution")
        super().__init__(
            sample,
            prompt_key="problem" if sample.get("problem") is not None else "question",
            answer_key="answer" if sample.get("answer") is not None else "solution",
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
        verdicts = await gather_verdicts(
            grader.grade(final_answer(completion_text(c)), self.target_of(row)) for c, row in zip(completions, rows, strict=True)
        )
        return [verdict if isinstance(verdict, GradingError) else float(bool(verdict)) for verdict in verdicts]


def gsm8k_reward(grader: MathGrader | None = None) -> MathReward:
    """The number after `####` of the column `answer`."""
    return MathReward("gsm8k", ["answer"], gsm8k_target, GSM8K_SYSTEM_PROMPT, grader or shared_grader())


def math_reward(grader: MathGrader | None = None) -> MathReward:
    r"""The last `\boxed{...}` of the column `answer`, or of `solution` if there is no `answer`;
    without a box its whole text."""
    return MathReward("math", ["answer", "solution"], math_target, MATH_SYSTEM_PROMPT, grader or shared_grader())
