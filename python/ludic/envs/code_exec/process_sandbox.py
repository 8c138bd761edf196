"""A sandbox whose first process is `ludic.envs.code_exec.in_sandbox`. Backends say how that process
starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ludic.envs.code_exec.in_sandbox.watch import longest_s
from ludic.envs.code_exec.runners import limit_of
from ludic.envs.code_exec.types import BatchExecutionSpec, CompileResult, CompileStatus, ExecutionResult, RunStatus
from ludic.envs.line_process import LineProcess
from ludic.errors import GradingError

T = TypeVar("T")

IN_SANDBOX = "ludic.envs.code_exec.in_sandbox"
"""The module that backends start with `python -m`."""
LONGEST_REPLY = 16 << 20
"""Bytes: twice a megabyte of output, six bytes for each byte at most, and some more."""
ANSWER_S = 20.0
"""How long a sandbox has for its answer beside the program's own time."""


def files_in_sandbox() -> dict[str, Path]:
    """Path below a folder of modules -> the file here, for all that the first process imports."""
    here = Path(__file__).with_name("in_sandbox")
    return {f"{IN_SANDBOX.replace('.', '/')}/{path.name}": path for path in sorted(here.glob("*.py"))}


class ProcessSandbox:
    """Runs programs one after another in the process that `process` starts.

    If that process fails, the call raises GradingError and the next call starts another one. A
    call that is cancelled kills it.
    """

    def __init__(self, process: LineProcess, *, memory_limit_mb: int = 256) -> None:
        self._process, self._memory_limit_mb = process, memory_limit_mb
        self._was_cancelled = False
        """Whether the process was killed because of that, and must be started again."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ludic-sandbox")
        """The one caller of the process. It lives as long as the sandbox, and so does the process,
        which is killed with the thread that started it."""

    @property
    def python_version(self) -> str:
        """As `3.11`; empty before the first call."""
        return str(self._process.greeting.get("python", ""))

    @classmethod
    async def started(cls, process: LineProcess, *, memory_limit_mb: int = 256) -> ProcessSandbox:
        """A sandbox whose process is ready. If it does not start, nothing is left of it."""
        sandbox = cls(process, memory_limit_mb=memory_limit_mb)
        try:
            await sandbox.reset()
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def reset(self) -> None:
        await self._ask({"op": "clean"}, timeout_s=ANSWER_S)

    async def stop(self) -> None:
        """End the process. The sandbox cannot be used again."""
        self._process.kill()
        await self._call(self._process.end)
        self._thread.shutdown(wait=False)

    async def compile(self, code: str, *, timeout_s: float = 5.0) -> CompileResult:
        request = {"op": "compile", "code": code, "timeout_s": timeout_s, "memory_mb": self._memory_limit_mb}
        reply = await self._ask(request, timeout_s=longest_s(request) + ANSWER_S)
        return CompileResult(
            CompileStatus(reply["status"]), reply["message"], reply["line"], reply["column"], duration_ms=reply["duration_ms"]
        )

    async def execute(
        self,
        code: str,
        *,
        stdin: str = "",
        skip_compile: bool = False,
        timeout_s: float = 10.0,
        memory_limit_mb: int | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> ExecutionResult:
        """Run the program. `timeout_s` is processor time; twice that is the limit of time."""
        compiled = CompileResult(CompileStatus.SUCCESS) if skip_compile else await self.compile(code, timeout_s=timeout_s)
        if not compiled.success:
            return ExecutionResult(compiled, compile_duration_ms=compiled.duration_ms, total_duration_ms=compiled.duration_ms)
        request = {
            "op": "run",
            "code": code,
            "stdin": stdin,
            "timeout_s": timeout_s,
            "memory_mb": memory_limit_mb or self._memory_limit_mb,
            "env": dict(env_vars or {}),
        }
        reply = await self._ask(request, timeout_s=longest_s(request) + ANSWER_S)
        return ExecutionResult(
            compiled,
            RunStatus(reply["status"]),
            stdout=reply["stdout"],
            stderr=reply["stderr"],
            exit_code=reply["exit_code"],
            compile_duration_ms=compiled.duration_ms,
            run_duration_ms=reply["duration_ms"],
            total_duration_ms=compiled.duration_ms + reply["duration_ms"],
            peak_memory_bytes=reply["peak_bytes"],
            cpu_time_ms=reply["cpu_ms"],
        )

    async def execute_batch(
        self, spec: BatchExecutionSpec
    ) -> AsyncGenerator[CompileResult | ExecutionResult | dict[str, Any], None]:
        """Each test runs when its answer is asked for, so the caller, who alone knows what is
        expected, can stop at the first wrong one."""
        if spec.compile_first:
            compiled = await self.compile(spec.code, timeout_s=spec.timeout_s)
            yield compiled
            if not compiled.success:
                yield {"type": "done", "total_tests": len(spec.tests), "compile_failed": True}
                return
        for test in spec.tests:
            result = await self.execute(
                spec.code,
                stdin=str(test.input),
                skip_compile=True,
                timeout_s=limit_of(test, "timeout_s", spec.timeout_s),
                memory_limit_mb=int(limit_of(test, "memory_limit_mb", self._memory_limit_mb)),
            )
            result.cache_key = test.id
            yield result
        yield {"type": "done", "total_tests": len(spec.tests), "compile_failed": False}

    async def _ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            if self._was_cancelled:
                self._process.end()
                self._was_cancelled = False
            reply = self._process.ask(request, timeout_s=timeout_s)
            if not reply.get("clean"):
                self._process.end()  # files are left, which the next program must not see: it gets a fresh process
            if "clean" not in reply:
                raise GradingError(f"the sandbox answered {sorted(reply)} instead of a result")
            return reply

        return await self._call(ask)

    async def _call(self, call: Callable[[], T]) -> T:
        """Run the call in the sandbox's thread. If the caller is cancelled, the process is killed,
        so that the thread is free at once."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except asyncio.CancelledError:
            self._was_cancelled = True
            self._process.kill()
            raise
