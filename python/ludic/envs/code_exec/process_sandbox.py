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
MODULES = ("leftovers", "watch", "run_program")
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
"""How long a sandbox has for its answer in addition to the program's own time."""


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

    def __init__(
        self,
        process: LineProcess,
        *,
        memory_limit_mb: int = 256,
        most_memory_mb: int | None = None,
        expected_version: str = "",
    ) -> None:
        """`memory_limit_mb` is a program's, unless a call says otherwise; at most `most_memory_mb`,
        which the limits around the process allow. `expected_version` is the Python's before the
        process starts."""
        self._process, self._memory_limit_mb, self._most_memory_mb = process, memory_limit_mb, most_memory_mb
        self._expected_version = expected_version
        self._stopped = False
        self._was_cancelled = False
        """Whether the process was killed because of that, and must be started again."""
        self._is_clean = False
        """Whether the process has said that nothing is left, and waits for any program."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ludic-sandbox")
        """The one caller of the process. It lives as long as the sandbox, and so does the process,
        which is killed with the thread that started it."""

    @property
    def python_version(self) -> str:
        """As `3.11`."""
        return str(self._process.greeting.get("python", self._expected_version))

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
        """Nothing is left of a program that has ended, so that its process is only asked where one
        may be left, or has more tests."""
        if not (self._is_clean and await self._call(self._process.is_silent)):
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
        return _compile_result(await self._ask(request, timeout_s=longest_s(request) + ANSWER_S))

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
        memory_mb = self._checked_memory(memory_limit_mb)
        request = {"stdin": stdin, "timeout_s": timeout_s, "memory_mb": memory_mb, "env": dict(env_vars or {})}
        return await self._run(code, request, compile_first=not skip_compile, more=False)

    async def execute_batch(
        self, spec: BatchExecutionSpec
    ) -> AsyncGenerator[CompileResult | ExecutionResult | dict[str, Any], None]:
        """Each test runs when its answer is read, so the caller, who alone knows the expected
        value, can stop at the first wrong one."""
        if spec.compile_first and not spec.tests:
            yield await self.compile(spec.code, timeout_s=spec.timeout_s)
        for place, test in enumerate(spec.tests):
            request = {
                "stdin": str(test.input),
                "timeout_s": limit_of(test, "timeout_s", spec.timeout_s),
                "memory_mb": self._checked_memory(int(limit_of(test, "memory_limit_mb", self._memory_limit_mb))),
                "env": {},
            }
            compiles = spec.compile_first and place == 0
            result = await self._run(spec.code, request, compile_first=compiles, more=place < len(spec.tests) - 1)
            if compiles:
                yield result.compile_result
            if not result.compiled:
                yield {"type": "done", "total_tests": len(spec.tests), "compile_failed": True}
                return
            result.cache_key = test.id
            yield result
        yield {"type": "done", "total_tests": len(spec.tests), "compile_failed": False}

    def _checked_memory(self, memory_limit_mb: int | None) -> int:
        memory_mb = memory_limit_mb or self._memory_limit_mb
        if self._most_memory_mb is not None and memory_mb > self._most_memory_mb:
            raise ConfigError(f"memory_limit_mb ({memory_mb}) must be <= {self._most_memory_mb}; raise memory_limit of the pool")
        return memory_mb

    async def _run(self, code: str, settings: Mapping[str, Any], *, compile_first: bool, more: bool) -> ExecutionResult:
        """`more`: the next request is of the same program."""
        request = {"op": "run", "code": code, **settings, "compile_first": compile_first, "more": more}
        reply = await self._ask(request, timeout_s=longest_s(request) + ANSWER_S)
        compiled = _compile_result(reply)
        if not compiled.success:
            return ExecutionResult(compiled, compile_duration_ms=compiled.duration_ms, total_duration_ms=compiled.duration_ms)
        return ExecutionResult(
            compiled,
            RunStatus(reply["status"]),
            stdout=reply["stdout"],
            stderr=reply["stderr"],
            exit_code=reply["exit_code"],
            compile_duration_ms=compiled.duration_ms,
            run_duration_ms=reply["duration_ms"] - compiled.duration_ms,
            total_duration_ms=reply["duration_ms"],
            peak_memory_bytes=reply["peak_bytes"],
            cpu_time_ms=reply["cpu_ms"],
        )

    async def _ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            if self._was_cancelled:
                self._process.end()
                self._was_cancelled = False
            self._is_clean = False
            reply = self._process.ask(request, timeout_s=timeout_s)
            if reply.get("again"):  # the handler was another program's
                reply = self._process.ask(request, timeout_s=timeout_s)
            self._is_clean = bool(reply.get("clean")) and not request.get("more")
            if not reply.get("clean"):
                self._process.end()  # files are left, which the next program must not see: it gets a fresh process
            if "clean" not in reply:
                raise GradingError(f"the sandbox answered {sorted(reply)} instead of a result")
            return reply

        return await self._call(ask)

    async def _call(self, call: Callable[[], T]) -> T:
        """Run the call in the sandbox's thread. If the caller is cancelled, the process is killed,
        so that the thread becomes free."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except asyncio.CancelledError:
            self._was_cancelled = True
            self._process.kill()
            raise


def _compile_result(reply: Mapping[str, Any]) -> CompileResult:
    """GradingError if nothing is known of the program, because the machine was too busy."""
    found = reply.get("compiled")
    if found is None:  # it was not compiled apart
        return CompileResult(CompileStatus.SUCCESS)
    if found["status"] == RunStatus.SANDBOX_ERROR:
        raise GradingError(f"the program was not compiled in time: {str(reply['stderr']).strip()}")
    return CompileResult(
        CompileStatus(found["status"]), found["message"], found["line"], found["column"], duration_ms=found["duration_ms"]
    )
