"""A task made of a data set of programming problems with tests: the user's own, or a public one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar

from ludic.data.sources import read_table
from ludic.envs.code_exec.adapters.apps import APPS_SYSTEM_PROMPT
from ludic.envs.code_exec.adapters.problem import CodingProblem, OneProblem, read_problem
from ludic.envs.code_exec.env import CodeExecConfig, CodeExecEnv
from ludic.envs.code_exec.sandbox import SandboxPool
from ludic.envs.code_exec.shared_pool import SharedSandboxPool, share_sandboxes
from ludic.errors import ConfigError, DataError
from ludic.parsers import extract_last_code_block
from ludic.tasks.data_task import TaskData, hash_text
from ludic.tasks.episodic import Problem, ProblemList
from ludic.types import StepOutcome

logger = logging.getLogger(__name__)

CODE_SYSTEM_PROMPT = (
    "You solve programming problems in Python. If a problem names a function, define it; else your program reads its input from "
    "stdin and prints its answer to stdout. Think first, then write the whole program in one ```python block, which must be the "
    "last one of your answer."
)
SHOWN_REFUSALS = 3


class CodeDataEnv(CodeExecEnv):
    """One answer, whose last fenced block is the program. `info["compiled"]`: it is valid."""

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        outcome = await super().env_step(extract_last_code_block(action) or "")
        info = outcome.info
        info["compiled"] = info.get("compile_failed") is False
        info["program_ms"] = info["timing"]["total_run_ms"] if info.get("cache_hit") is False else 0.0
        return outcome


class CodeData(ProblemList):
    """The problems of a data set whose columns `read_problem` knows. The reward is 1 if all tests
    pass, else 0; with `partial_credit` the share that passes. An answer without a program earns 0.

    Problems whose tests cannot be judged are left out, and logged with the reason.
    """

    success_reward = 1.0
    facts: ClassVar[Mapping[str, str]] = {"compiled": "the answer has a valid program"}
    measures: ClassVar[Mapping[str, str]] = {"program_ms": "milliseconds that its program ran; 0 if it was judged before"}
    rates = facts

    def __init__(
        self,
        data: TaskData | str | None = None,
        *,
        partial_credit: bool = False,
        max_new_tokens: int = 1024,
        timeout_per_test_s: float = 5.0,
        memory_limit_mb: int = 256,
        max_tests: int | None = None,
        workers: int | None = None,
        backend: str = "auto",
        pool: SandboxPool | None = None,
    ) -> None:
        """Limits apply to tests for which the data set has none. `workers` sandboxes of `backend`
        (docs/code.md). None means one for each processor. `pool`: sandboxes of your own, in
        Python."""
        rows = TaskData.of(data)
        if not isinstance(rows.source, str):
            raise ConfigError(
                f"data ({rows.source!r}) must be one file, folder or hub id: programs are judged by the tests of its rows"
            )
        if rows.streaming:
            raise ConfigError("streaming=true is for prompts with reward functions; the tests of programs are read into memory")
        self.max_new_tokens = max_new_tokens
        self._settings = CodeExecConfig(
            timeout_per_test_s=timeout_per_test_s,
            memory_limit_mb=memory_limit_mb,
            max_tests=max_tests,
            partial_credit=partial_credit,
            compile_failure_reward=0.0,
        )
        self._problems: dict[str, CodingProblem] = {}
        """By the ids of this task."""

        def read(source: str, split: str, prefix: str) -> list[Problem]:
            return self._read(rows, source, split, prefix)

        problems, self.training, self._heldout = rows.divide(read, key=lambda problem: hash_text(problem["question"]))
        content = [self._problems[problem["id"]] for problem in problems]
        self.digest = hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self._pool = share_sandboxes(workers, backend) if pool is None else SharedSandboxPool.of(pool)

    @property
    def reward_sees(self) -> str:
        return f"{'how many' if self._settings.partial_credit else 'whether all'} tests of the problem pass"

    @property
    def system_prompt(self) -> str:
        """Suggested for recipes without one."""
        return CODE_SYSTEM_PROMPT if any(problem.calls for problem in self._problems.values()) else APPS_SYSTEM_PROMPT

    @property
    def execution_s(self) -> float:
        """Wall time in which programs ran."""
        return self._pool.seconds

    async def aclose(self) -> None:
        await self._pool.shutdown()

    def heldout(self) -> Sequence[Problem]:
        return self._heldout

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        """A right program of the row, in a fenced block."""
        solutions = self._problems[problem["id"]].solutions
        if not solutions:
            raise ConfigError(
                f"a warm-up needs right programs, and problem {problem['id']} has none in `solutions`; disable it with warmup.steps=0"
            )
        return f"```python\n{rng.choice(solutions).strip()}\n```"

    def make_env(self, problem: Problem) -> CodeDataEnv:
        known = self._problems[problem["id"]]
        return CodeDataEnv(
            problem,
            sandbox_pool=self._pool,
            test_adapter=OneProblem(known),
            code_runner=known.make_runner(self._settings.timeout_per_test_s, self._settings.memory_limit_mb),
            config=self._settings,
        )

    def _read(self, rows: TaskData, source: str, split: str, prefix: str) -> list[Problem]:
        table = read_table(source, config=rows.config, split=split)
        problems, refusals = [], []
        for index, row in enumerate(table.rows):
            try:
                known = read_problem(row, prompt_column=rows.prompt_column)
            except DataError as error:
                refusals.append(f"{table.where(index)}: {error}")
                continue
            name = f"{prefix}{index}"
            self._problems[name] = known
            answer = next(iter(known.solutions), "")
            problems.append(Problem(id=name, question=known.prompt, answer=answer))
        shown = "; ".join(refusals[:SHOWN_REFUSALS])
        if not problems:
            raise DataError(f"{source} has no problem that can be judged. {shown}")
        if refusals:
            logger.warning("%d of %d problems of %s are left out: %s", len(refusals), len(table.rows), source, shown)
        return problems
