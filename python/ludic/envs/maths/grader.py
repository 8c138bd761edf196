"""Compares answers by math-verify, in separate processes with a deadline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ludic.envs.line_process import GraderCounts, LineProcessPool
from ludic.errors import MissingExtraError

__all__ = ["GraderCounts", "MathGrader", "shared_grader"]

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
