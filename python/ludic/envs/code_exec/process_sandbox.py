"""A sandbox whose first process is `ludic.envs.code_exec.in_sandbox`. Backends say how that process
starts."""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ludic.envs.code_exec.in_sandbox.watch import longest_s
from ludic.envs.code_exec.runners import limit_of
from ludic.envs.code_exec.types import BatchExecutionSpec, CompileResult, CompileStatus, ExecutionResult, RunStatus
from ludic.envs.line_process import LineProcess
from ludic.errors import ConfigError, GradingError

T = TypeVar("T")

IN_SANDBOX = "ludic.envs.code_exec.in_sandbox"
MODULES = ("process_control", "leftovers", "watch", "program", "runs", "__main__")
"""Of the first process. Each imports only those before it."""
BOOT = """
import base64, json, sys, types, zlib
sent = json.loads(zlib.decompress(base64.b64decode(sys.argv.pop())))
for name, source in sent["modules"].items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main(sent["places"], base64.b64decode(sent["filter"]))
"""
"""What the interpreter of a sandbox runs: no file of this library needs to be there."""
LONGEST_REPLY = 16 << 20
"""Bytes: twice a megabyte of output, six bytes for each byte at most, and some more."""
ANSWER_S = 20.0
"""How long a sandbox has for its answer beside the program's own time."""


def first_process(python: str, places: Sequence[str], *, system_call_filter: bytes = b"") -> list[str]:
    """The command of the first process. `places` are the folders that programs can write to, and
    start in the first of; it installs the filter, if there is one, before its first program."""
    here = Path(__file__).with_name("in_sandbox")
    sent = {
        "modules": {f"{IN_SANDBOX}.{name}": (here / f"{name}.py").read_text(encoding="utf-8") for name in MODULES},
        "places": list(places),
        "filter": base64.b64encode(system_call_filter).decode(),
    }
    packed = base64.b64encode(zlib.compress(json.dumps(sent).encode())).decode()
    return [python, "-S", "-s", "-B", "-c", BOOT, IN_SANDBOX, packed]


class ProcessSandbox:
    """Runs programs one after another in the process that `process` starts.

    If that process fails, the call raises GradingError and the next call starts another one. A
    call that is cancelled kills it.
    """

    def __init__(self, process: LineProcess, *, memory_limit_mb: int = 256, most_memory_mb: int | None = None) -> None:
        """`memory_limit_mb` is a program's, unless a call says otherwise; at most
        `most_memory_mb`, which what is around the process allows."""
        self._process, self._memory_limit_mb, self._most_memory_mb = process, memory_limit_mb, most_memory_mb
        self._stopped = False
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
        await sandbox.start()
        return sandbox

    async def start(self) -> None:
        """Start the process; if that fails, nothing is left of it."""
        try:
            await self.reset()
        except BaseException:
            await self.stop()
            raise

    async def reset(self) -> None:
        await self._ask({"op": "clean"}, timeout_s=ANSWER_S)

    async def stop(self) -> None:
        """End the process. The sandbox cannot be used again."""
        if self._stopped:
            return
        self._stopped = True
        try:
            self._process.kill()
            await self._call(self._process.end)
        finally:
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
        memory_mb = memory_limit_mb or self._memory_limit_mb
        if self._most_memory_mb is not None and memory_mb > self._most_memory_mb:
            raise ConfigError(
                f"memory_limit_mb ({memory_mb}) of a program must be <= {self._most_memory_mb}, the memory of its sandbox; "
                "raise memory_limit of the pool's config"
            )
        compiled = CompileResult(CompileStatus.SUCCESS) if skip_compile else await self.compile(code, timeout_s=timeout_s)
        if not compiled.success:
            return ExecutionResult(compiled, compile_duration_ms=compiled.duration_ms, total_duration_ms=compiled.duration_ms)
        request = {
            "op": "run",
            "code": code,
            "stdin": stdin,
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
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
