"""The protocols of a sandbox, which runs programs, and of a pool of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol, runtime_checkable

from ludic.envs.code_exec.types import BatchExecutionSpec, BatchTestResult, CompileResult, ExecutionResult


@runtime_checkable
class Sandbox(Protocol):
    """Runs one program after another, without harm to anything outside."""

    @property
    def python_version(self) -> str: ...

    async def reset(self) -> None:
        """End what the last program left, and delete its files. An error means that the sandbox
        must not be used again."""

    async def compile(self, code: str, *, timeout_s: float = 5.0) -> CompileResult: ...

    async def execute(
        self,
        code: str,
        *,
        stdin: str = "",
        skip_compile: bool = False,
        timeout_s: float = 10.0,
        memory_limit_mb: int | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> ExecutionResult: ...


@runtime_checkable
class BatchSandbox(Sandbox, Protocol):
    """A sandbox that takes a program with all its tests."""

    def execute_batch(self, spec: BatchExecutionSpec) -> AsyncGenerator[CompileResult | ExecutionResult | dict[str, Any], None]:
        """A CompileResult, if it compiles first; then an ExecutionResult for each test that ran,
        with the test's id as `cache_key`; last `{"type": "done", ...}`."""


@runtime_checkable
class SandboxPool(Protocol):
    """Lends sandboxes, and keeps results."""

    @property
    def python_version(self) -> str: ...

    @property
    def available(self) -> int:
        """Sandboxes that can be lent at the same time."""

    @property
    def cache_stats(self) -> dict[str, int]: ...

    async def start(self) -> None: ...

    async def checkout(self, timeout_s: float = 30.0) -> Sandbox: ...

    async def release(self, sandbox: Sandbox) -> None: ...

    async def shutdown(self) -> None: ...

    def get_cached(self, code_hash: str, tests_hash: str) -> BatchTestResult | None: ...

    def put_cached(self, code_hash: str, tests_hash: str, result: BatchTestResult) -> None: ...
