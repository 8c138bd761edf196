"""A programming problem: one answer, a program, whose reward is whether its tests pass."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ludic.envs.code_exec.adapters.base import ExactMatchVerifier, OutputVerifier, TestAdapter
from ludic.envs.code_exec.runners import CodeRunner, StdinStdoutRunner
from ludic.envs.code_exec.types import BatchTestResult, HashedTests, RunStatus, SandboxPool, TestResult, compute_hash
from ludic.envs.env import SingleAgentEnv
from ludic.errors import GradingError, check_value
from ludic.types import Info, StepOutcome

logger = logging.getLogger(__name__)

CHECKOUT_S = 3600.0
"""How long a program may wait for a sandbox. Each sandbox ends its own program in time, so that
waiting programs are served; a pool that has given up says so immediately."""
TRIES = 3
"""Sandboxes that a program is judged in, if they fail, before its episode fails."""


@dataclass(frozen=True)
class CodeExecConfig:
    """How programs are judged, and what for."""

    timeout_per_test_s: float = 5.0
    memory_limit_mb: int = 256
    max_tests: int | None = None
    """The first tests of a problem alone."""
    stop_on_first_failure: bool = True
    """Ignored with `partial_credit`, which needs all verdicts."""
    compile_first: bool = True
    partial_credit: bool = False
    """The reward is the share of the tests that pass, not 1 or 0."""
    compile_failure_reward: float = -0.1
    """Also of an empty answer."""
    include_stderr_in_obs: bool = True
    max_error_length: int = 500
    """Characters of an error in the observation."""
    use_cache: bool = True
    """Do not run a program again that was judged by the same tests."""

    def __post_init__(self) -> None:
        for name in ("timeout_per_test_s", "memory_limit_mb", "max_error_length"):
            check_value(name, getattr(self, name), above=0, below=math.inf)
        check_value("max_tests", self.max_tests, "None runs all tests", least=1, optional=True)


class CodeExecEnv(SingleAgentEnv):
    """Shows the problem of one row, takes one program, runs it, and ends.

    The reward is 1 if all tests pass, else 0 (or the share that passes, with `partial_credit`), or
    `compile_failure_reward`. If sandboxes fail, GradingError is raised: the episode fails and has
    no reward.
    """

    def __init__(
        self,
        sample: Mapping[str, Any],
        *,
        sandbox_pool: SandboxPool,
        test_adapter: TestAdapter,
        code_runner: CodeRunner | None = None,
        verifier: OutputVerifier | None = None,
        config: CodeExecConfig | None = None,
        system_prompt: str | None = None,
    ) -> None:
        super().__init__()
        self.sample, self._pool, self._adapter = sample, sandbox_pool, test_adapter
        self._config = config or CodeExecConfig()
        self._runner = code_runner or StdinStdoutRunner(self._config.timeout_per_test_s, self._config.memory_limit_mb)
        self._verifier = verifier or getattr(self._runner, "default_verifier", None) or ExactMatchVerifier()
        self._system_prompt = system_prompt
        self._problem_id = str(test_adapter.get_problem_id(sample))
        self._tests: HashedTests | None = None
        self._obs = "Error: call reset() before the first observation"

    async def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:  # type: ignore[override]  # the protocol awaits it
        """The problem; the same at every reset, for any seed."""
        tests = list(self._adapter.get_tests(self.sample))[: self._config.max_tests]
        self._tests = HashedTests(tests, self._adapter.hash_tests(tests) if tests else "")
        if not tests:
            self._obs = f"Error: problem {self._problem_id} has no tests"
            return self._obs, {"problem_id": self._problem_id, "error": "no_tests_extracted"}
        self._obs = self._adapter.get_prompt(self.sample)
        return self._obs, {
            "problem_id": self._problem_id,
            "num_tests": len(tests),
            "tests_hash": self._tests.tests_hash,
            "python_version": self._pool.python_version,
        }

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        if self._tests is None:
            return self._refuse(-1.0, "reset_not_called", "Error: call reset() before the first step")
        if not self._tests:
            return self._refuse(-1.0, "no_tests_extracted", self._obs)
        if not action.strip():
            return self._refuse(self._config.compile_failure_reward, "empty_code", "Error: the answer has no program")
        result, cached = await self._judge(action, self._tests)
        self._obs = self._feedback(result)
        return StepOutcome(
            obs=self._obs, reward=self._reward(result), truncated=False, terminated=True, info=self._info(result, cached)
        )

    def env_current_obs(self) -> str:
        return self._obs

    async def _judge(self, code: str, tests: HashedTests) -> tuple[BatchTestResult, bool]:
        """The verdicts, and whether they are from an earlier run."""
        code_hash, judged_by = compute_hash(code), self._cache_key(tests)
        if self._config.use_cache and (known := self._pool.get_cached(code_hash, judged_by)) is not None:
            return known, True
        for _ in range(TRIES):
            sandbox = await self._pool.checkout(timeout_s=CHECKOUT_S)
            try:
                result = await self._runner.run_tests(
                    sandbox,
                    code,
                    tests,
                    verifier=self._verifier,
                    stop_on_first_failure=self._config.stop_on_first_failure and not self._config.partial_credit,
                    compile_first=self._config.compile_first,
                )
            finally:
                await self._pool.release(sandbox)
            if not result.sandbox_failed:
                result = replace(result, code_hash=code_hash, tests_hash=tests.tests_hash)
                if self._config.use_cache:
                    self._pool.put_cached(code_hash, judged_by, result)
                return result, False
            logger.warning("problem %s: %s", self._problem_id, _reason(result))
        raise GradingError(f"problem {self._problem_id} could not be judged in {TRIES} sandboxes: {_reason(result)}")

    def _cache_key(self, tests: HashedTests) -> str:
        """The hash of the tests, and of what else a verdict depends on, unless it is the
        default."""
        config = self._config
        settings: list[Any] = [
            config.stop_on_first_failure and not config.partial_credit,
            config.compile_first,
            config.timeout_per_test_s,
            config.memory_limit_mb,
            [test.metadata for test in tests if test.metadata],
            *map(_description, (self._runner, self._verifier)),
        ]
        return tests.tests_hash if settings == _DEFAULT_SETTINGS else compute_hash(f"{tests.tests_hash} {settings!r}")

    def _reward(self, result: BatchTestResult) -> float:
        if result.compile_failed:
            return self._config.compile_failure_reward
        if result.all_passed:
            return 1.0
        return result.pass_rate if self._config.partial_credit else 0.0

    def _refuse(self, reward: float, error: str, obs: str) -> StepOutcome:
        self._obs = obs
        return StepOutcome(
            obs=obs, reward=reward, truncated=False, terminated=True, info={"problem_id": self._problem_id, "error": error}
        )

    def _feedback(self, result: BatchTestResult) -> str:
        """What the model is told."""
        failure = result.first_failure
        if failure is None:
            return f"All {result.total_count} tests passed"
        if result.compile_failed:
            compiled = failure.execution.compile_result
            place = f" (line {compiled.error_line})" if compiled.error_line is not None else ""
            return f"Compilation failed: {self._cut(compiled.error_message or compiled.status.value)}{place}"
        lines = [f"Tests failed: {result.passed_count}/{result.total_count} passed"]
        if failure.comparison_details:
            lines.append(f"First failure: {self._cut(failure.comparison_details)}")
        if self._config.include_stderr_in_obs and failure.execution.stderr.strip():
            lines.append(f"Stderr: {self._cut(failure.execution.stderr.strip())}")
        return "\n".join(lines)

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._config.max_error_length else f"{text[: self._config.max_error_length]}..."

    def _info(self, result: BatchTestResult, cached: bool) -> Info:
        return {
            "problem_id": self._problem_id,
            "code_hash": result.code_hash,
            "tests_hash": result.tests_hash,
            "passed": result.passed_count,
            "total": result.total_count,
            "all_passed": result.all_passed,
            "pass_rate": result.pass_rate,
            "compile_failed": result.compile_failed,
            "test_results": [_test_info(test) for test in result.results],
            "timing": {
                "total_compile_ms": result.total_compile_ms,
                "total_run_ms": result.total_run_ms,
                "total_execution_ms": result.total_execution_ms,
            },
            "cache_hit": cached,
            "cache_stats": self._pool.cache_stats,
            "python_version": self._pool.python_version,
        }


def _test_info(result: TestResult) -> Info:
    execution = result.execution
    info: Info = {
        "test_id": result.test_case.id,
        "passed": result.passed,
        "compiled": result.compiled,
        "ran": result.ran,
        "run_status": execution.run_status.value if execution.run_status is not None else None,
        "compile_status": execution.compile_result.status.value,
        "run_duration_ms": execution.run_duration_ms,
        "stdout": execution.stdout,
        "stderr": execution.stderr,
    }
    if not result.passed:
        info["failure_reason"] = result.comparison_details
    return info


def _reason(result: BatchTestResult) -> str:
    return next(str(test.comparison_details) for test in result.results if test.execution.run_status is RunStatus.SANDBOX_ERROR)


def _description(part: object) -> str:
    """The class of a runner or verifier and its settings."""
    return f"{type(part).__module__}.{type(part).__qualname__} {sorted(vars(part).items())}"


_DEFAULT_SETTINGS: list[Any] = [True, True, 5.0, 256, [], *map(_description, (StdinStdoutRunner(), ExactMatchVerifier()))]
