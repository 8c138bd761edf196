"""Extracts answers, from rows of GSM8K and MATH and from a model's text, and compares them by
math-verify, in separate processes with a deadline."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ludic.envs.line_process import GraderCounts as GraderCounts, LineProcessPool
from ludic.errors import DataError, MissingExtraError
from ludic.parsers import extract_last_boxed_content

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
