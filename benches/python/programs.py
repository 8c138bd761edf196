"""Programs judged in sandboxes: how many a second, against a process for each test.

    python -m benches.python.programs                 # 1, 10 and 100 tests each; 1 to 16 workers
    python -m benches.python.programs --seconds 1 --tests 10 --workers 1

A program doubles numbers. "process": `subprocess.run([sys.executable, FILE])` for each test, with
no sandbox and no limit; "bare": the same with `-S -s` and no virtual environment, which is as fast
as an interpreter starts; "stdin": `StdinStdoutRunner` in a sandbox; "calls":
`FunctionCallRunner`. Every program is new, so that none is known. The contenders take turns;
a ratio is the median over rounds of the programs a second against "process", and against "bare", in
the same round. The whole takes two to three minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from statistics import median

from ludic.envs.code_exec import ExactMatchVerifier, StdinStdoutRunner, TestCase, create_sandbox_pool
from ludic.envs.code_exec.bubblewrap import find_python
from ludic.envs.code_exec.calls import FunctionCallRunner
from ludic.envs.code_exec.pool import BaseSandboxPool

PYTHON = str(find_python(None))
NUMBERS = itertools.count()
Judge = Callable[[], Awaitable[None]]
"""Judges one program."""


def stdin_program() -> str:
    return f"print(2 * int(input()))  # {next(NUMBERS)}"


async def judge_by_processes(command: list[str], tests: int) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(stdin_program())
        file.flush()
        for number in range(tests):
            ended = subprocess.run([*command, file.name], input=str(number), capture_output=True, text=True)
            assert ended.stdout.strip() == str(2 * number), ended


async def judge_by_stdin(pool: BaseSandboxPool, tests: int) -> None:
    cases = [TestCase(str(number), str(2 * number)) for number in range(tests)]
    sandbox = await pool.checkout(timeout_s=600)
    batch = await StdinStdoutRunner(60.0).run_tests(sandbox, stdin_program(), cases, verifier=ExactMatchVerifier())
    await pool.release(sandbox)
    assert batch.all_passed, batch


async def judge_by_calls(pool: BaseSandboxPool, tests: int) -> None:
    cases = [TestCase(f"f({number})", 2 * number) for number in range(tests)]
    runner = FunctionCallRunner(60.0)
    sandbox = await pool.checkout(timeout_s=600)
    program = f"f = lambda n: 2 * n  # {next(NUMBERS)}"
    batch = await runner.run_tests(sandbox, program, cases, verifier=runner.default_verifier)
    await pool.release(sandbox)
    assert batch.all_passed, batch


async def measure(judge: Judge, seconds: float, at_once: int = 1) -> float:
    """Programs a second, of `at_once` judges."""
    judged, started = 0, time.perf_counter()

    async def work() -> None:
        nonlocal judged
        while judged == 0 or time.perf_counter() - started < seconds:
            await judge()
            judged += 1

    await asyncio.gather(*(work() for _ in range(at_once)))
    return judged / (time.perf_counter() - started)


async def compare(tests: int, seconds: float, rounds: int) -> str:
    """A row of the first table."""
    pool = await create_sandbox_pool(1, python_version=None)
    judges: dict[str, Judge] = {
        "process": lambda: judge_by_processes([sys.executable], tests),
        "bare": lambda: judge_by_processes([PYTHON, "-S", "-s"], tests),
        "stdin": lambda: judge_by_stdin(pool, tests),
        "calls": lambda: judge_by_calls(pool, tests),
    }
    rates: dict[str, list[float]] = {name: [] for name in judges}
    for _ in range(rounds):
        for name, judge in judges.items():
            rates[name].append(await measure(judge, seconds))
    await pool.shutdown()
    ratios = [
        f"{median(a / b for a, b in zip(rates[name], rates[other], strict=True)):.1f}x"
        for name in ("stdin", "calls")
        for other in ("process", "bare")
    ]
    return f"| {' | '.join([str(tests), *(f'{median(rates[name]):.1f}' for name in judges), *ratios])} |"


async def scale(workers: int, tests: int, seconds: float) -> tuple[float, float]:
    """Programs a second by this many workers: of stdin, and of calls."""
    pool = await create_sandbox_pool(workers, python_version=None)
    stdin = await measure(lambda: judge_by_stdin(pool, tests), seconds, workers)
    calls = await measure(lambda: judge_by_calls(pool, tests), seconds, workers)
    await pool.shutdown()
    return stdin, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contender in each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| tests | process, programs/s | bare | stdin | calls | stdin: process | : bare | calls: process | : bare |")
    print("|---" * 9 + "|")
    for tests in options.tests:
        print(asyncio.run(compare(tests, options.seconds, options.rounds)), flush=True)
    print("\n10 tests each:\n\n| workers | stdin, programs/s | calls |\n|---|---|---|")
    for workers in options.workers:
        print("| {} | {:.1f} | {:.1f} |".format(workers, *asyncio.run(scale(workers, 10, options.seconds))), flush=True)


if __name__ == "__main__":
    main()
