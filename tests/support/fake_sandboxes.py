"""Sandboxes and a pool without processes."""

import asyncio

from ludic.envs.code_exec.pool import BaseSandboxPool
from ludic.envs.code_exec.types import CompileResult, CompileStatus, ExecutionResult, RunStatus

VALID = CompileResult(CompileStatus.SUCCESS)


class Scripted:
    """Its programs are what `answers` says: a stdout, a RunStatus, a CompileResult or an error."""

    python_version = "3.11"

    def __init__(self, number=0, answers=None):
        self.number, self.answers = number, answers if answers is not None else {}
        self.runs, self.resets, self.stopped = 0, 0, False
        self.reset_failures, self.reset_hangs = 0, False

    async def reset(self):
        if self.reset_hangs:
            await asyncio.sleep(3600)
        if self.reset_failures:
            self.reset_failures -= 1
            raise OSError(f"sandbox {self.number} is broken")
        self.resets += 1

    async def stop(self):
        self.stopped = True

    async def compile(self, code, *, timeout_s=5.0):
        answer = self.answers.get(code)
        return answer if isinstance(answer, CompileResult) else VALID

    async def execute(self, code, *, stdin="", **limits):
        self.runs += 1
        answer = self.answers.get(code, code)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, RunStatus):
            return ExecutionResult(VALID, answer, stderr="it failed\n", exit_code=1)
        return ExecutionResult(VALID, RunStatus.SUCCESS, stdout=answer)


class FakePool(BaseSandboxPool):
    """`start_failures` of the next starts fail."""

    python_version = "3.11"

    def __init__(self, *arguments, answers=None, **settings):
        super().__init__(*arguments, **settings)
        self.made, self.start_failures, self.answers = [], 0, answers

    async def _start_sandbox(self):
        if self.start_failures:
            self.start_failures -= 1
            raise OSError("no room")
        self.made.append(Scripted(len(self.made), self.answers))
        return self.made[-1]
