"""Compares answers by math-verify, in separate processes with a deadline."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ludic.envs.line_process import LineProcess
from ludic.errors import ConfigError, GradingError, MissingExtraError

WORKER = Path(__file__).with_name("worker.py")


@dataclass
class GraderCounts:
    """Counts of all answers so far."""

    graded: int = 0
    """Right or wrong."""
    failed: int = 0
    """The comparison raised, or its process died."""
    timed_out: int = 0


class MathGrader:
    """Compares answers with targets by math-verify: `0.5` is `\\frac{1}{2}`, `x^2+2x+1` is
    `(x+1)^2`.

    Comparisons run in `workers` processes (None: one for each core, at most 8), which start at the
    first use. A comparison that takes longer than `timeout_s` is killed with its process. This and
    every other failure raises GradingError and is counted in `counts`; it is never a verdict.
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
        workers = min(8, os.cpu_count() or 1) if workers is None else workers
        if timeout_s <= 0 or workers < 1:
            raise ConfigError(f"timeout_s ({timeout_s}) must be > 0 and workers ({workers}) >= 1")
        if command is None and find_spec("math_verify") is None:
            raise MissingExtraError.for_extra("math-verify", "math")
        self.timeout_s = timeout_s
        self.counts = GraderCounts()
        self._counting = threading.Lock()
        self._command = command or [sys.executable, "-P", str(WORKER), str(memory_mb)]
        processes = [LineProcess(self._command, start_timeout_s=start_timeout_s) for _ in range(workers)]
        self._idle: queue.LifoQueue[LineProcess] = queue.LifoQueue()
        for process in processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="math-grader")
        self._end = weakref.finalize(self, _end_all, processes, self._threads)

    async def grade(self, answer: str, target: str) -> bool:
        """Whether `answer`, or the expression in it, equals `target`, an expression in LaTeX or
        plain notation.

        Raises GradingError. The deadline starts when a process is free.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.grade_now, answer, target)

    def grade_now(self, answer: str, target: str) -> bool:
        """The same for synchronous code."""
        process = self._idle.get()
        try:
            reply = process.ask({"target": target, "answer": answer, "limit_s": 2 * self.timeout_s + 1}, timeout_s=self.timeout_s)
        except TimeoutError as error:
            self._count(timed_out=1)
            raise GradingError(
                f"grading took longer than {self.timeout_s} s: {_shown(answer)} against {_shown(target)}"
            ) from error
        except GradingError:
            self._count(failed=1)
            raise
        finally:
            self._idle.put(process)
        if not isinstance(reply.get("correct"), bool):
            self._count(failed=1)
            raise GradingError(f"{reply.get('error', reply)}: grading {_shown(answer)} against {_shown(target)}")
        self._count(graded=1)
        return bool(reply["correct"])

    def close(self) -> None:
        """End the processes."""
        self._end()

    def _count(self, *, graded: int = 0, failed: int = 0, timed_out: int = 0) -> None:
        with self._counting:
            self.counts.graded += graded
            self.counts.failed += failed
            self.counts.timed_out += timed_out


@cache
def shared_grader() -> MathGrader:
    """The default grader of environments and rewards."""
    return MathGrader()


def _end_all(processes: Sequence[LineProcess], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.end()


def _shown(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else f"{text[:limit]}...")
