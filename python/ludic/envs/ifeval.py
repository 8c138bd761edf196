"""IFEval (Zhou et al., arXiv:2311.07911): whether an answer follows the instructions of its prompt
that a program can check, such as a number of words.

The checks of lm-evaluation-harness run in separate processes with a deadline. They are strict: the
answer counts as it is, without text before `</think>`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ludic.envs.line_process import LineProcessPool, gather_verdicts
from ludic.envs.maths.grader import completion_text
from ludic.errors import DataError, GradingError, MissingExtraError

WORKER = Path(__file__).with_name("ifeval_worker.py")


class InstructionChecker(LineProcessPool):
    """Asks which instructions an answer follows. `start_timeout_s` includes a download at the
    first use; `command` replaces the worker by another program with the same protocol."""

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        workers: int | None = None,
        start_timeout_s: float = 300.0,
        command: Sequence[str] | None = None,
    ) -> None:
        if command is None and None in map(find_spec, ("lm_eval", "langdetect", "nltk")):
            raise MissingExtraError.for_extra("lm-eval[ifeval]", "ifeval")
        command = command or [sys.executable, "-P", str(WORKER)]
        super().__init__(command, timeout_s=timeout_s, workers=workers, start_timeout_s=start_timeout_s, name="the checker")

    async def check_answer(self, answer: str, row: Mapping[str, Any]) -> list[bool]:
        """One verdict for each of the row's instructions. Raises GradingError."""
        return await self.run_in_thread(self._check_now, answer, row)

    def _check_now(self, answer: str, row: Mapping[str, Any]) -> list[bool]:
        what = f"checking an answer by {', '.join(row['instruction_id_list'])}"
        verdicts: list[bool] = self.check(self.ask({"doc": row, "answer": answer}, what), "followed", list, what)
        return verdicts


@cache
def shared_checker() -> InstructionChecker:
    """The default checker of the rewards."""
    return InstructionChecker()


class IFEvalReward:
    """1 if an answer follows all instructions of its row, else 0 (prompt-level strict accuracy).
    With `by_instruction` the share of them that it follows."""

    def __init__(self, *, by_instruction: bool = False, checker: InstructionChecker | None = None) -> None:
        self.__name__ = "ifeval_instructions" if by_instruction else "ifeval"
        self._by_instruction, self._checker = by_instruction, checker or shared_checker()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError for a row without instructions, or without arguments for each."""
        names, arguments = row.get("instruction_id_list"), row.get("kwargs")
        if not names or not isinstance(arguments, list) or len(arguments) != len(names):
            raise DataError(
                f"a row of IFEval needs instructions and arguments for each: instruction_id_list is {names}, kwargs is {arguments}"
            )

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        instruction_id_list: Sequence[list[str]],
        kwargs: Sequence[list[dict[str, Any]]],
    ) -> list[float | GradingError]:
        """The hub id google/IFEval has these columns."""
        answers = [completion_text(completion).rpartition("</think>")[2].strip() for completion in completions]
        rows = [
            {"key": 0, "prompt": prompt, "instruction_id_list": names, "kwargs": arguments}
            for prompt, names, arguments in zip(prompts, instruction_id_list, kwargs, strict=True)
        ]
        checks = (self._checker.check_answer(answer, row) for answer, row in zip(answers, rows, strict=True))
        verdicts = await gather_verdicts(checks)
        return [self._reward(verdict) if isinstance(verdict, list) else verdict for verdict in verdicts]

    def _reward(self, verdicts: list[bool]) -> float:
        return sum(verdicts) / len(verdicts) if self._by_instruction else float(all(verdicts))
