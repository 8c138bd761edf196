"""Runs programs without any sandbox, for programs that are trusted."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.bubblewrap import OWN_VERSION, find_python
from ludic.envs.code_exec.pool import BaseSandboxPool
from ludic.envs.code_exec.process_sandbox import LONGEST_REPLY, ProcessSandbox, first_process
from ludic.envs.line_process import LineProcess


class UnsafeProcess(LineProcess):
    """A process of this user, with a folder of its own, which it deletes if this process ends
    first."""

    def __init__(self, python: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ludic-programs-"))
        command = first_process(str(python), [str(self._folder)])
        super().__init__(command, start_timeout_s=30.0, name="the program runner", longest_reply=LONGEST_REPLY)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._new_stderr(),
            env={"PATH": os.defpath, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
            start_new_session=True,
        )

    def end(self) -> int | None:
        code = super().end()
        shutil.rmtree(self._folder, ignore_errors=True)
        return code


class UnsafeSubprocessPool(BaseSandboxPool):
    """**No sandbox**: programs can read and delete this user's files, and use the network. The
    limits of time, memory and output hold. Warns once."""

    def __init__(self, n_workers: int = 4, python_version: str | None = None, **settings: Any) -> None:
        """`settings` are arguments of `BaseSandboxPool`."""
        super().__init__(n_workers, **settings)
        self._python_version = python_version or OWN_VERSION
        warnings.warn(
            "unsafe_subprocess runs programs without a sandbox: they can do all that this user can", RuntimeWarning, stacklevel=2
        )

    @property
    def python_version(self) -> str:
        return self._python_version

    async def _start_sandbox(self) -> ProcessSandbox:
        return await ProcessSandbox.started(UnsafeProcess(find_python(self._python_version)))
