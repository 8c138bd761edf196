"""A child process that answers each JSON line with a JSON line, and is killed at a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import GradingError

LONGEST_REPLY = 1 << 20
"""Bytes."""


class LineProcess:
    """Starts at the first request, and again after a failure or a kill. For one caller at a time.

    Its first line, due within `start_timeout_s`, means that it is ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_timeout_s: float = 60.0,
        name: str = "the grader",
        longest_reply: int = LONGEST_REPLY,
    ) -> None:
        """`name` is for messages; `longest_reply` is in bytes."""
        self._command, self._start_timeout_s = list(command), start_timeout_s
        self._name, self._longest_reply = name, longest_reply
        self._process: subprocess.Popen[bytes] | None = None
        self.greeting: dict[str, Any] = {}
        """The first line of the process that runs, or of the last one."""

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply. Raises TimeoutError at the deadline, and
        GradingError if the process dies or its reply is not JSON; in all cases the process is
        killed."""
        try:
            process = self._process or self._start()
            deadline = time.monotonic() + timeout_s
            self._write(process, json.dumps(request).encode() + b"\n", deadline, timeout_s)
            return self._read_line(process, deadline, timeout_s)
        except (OSError, EOFError, ValueError) as error:
            code = self.end()
            if isinstance(error, TimeoutError):
                raise
            raise GradingError(f"{self._name}'s process failed (exit status {code}): {type(error).__name__}: {error}") from error
        except BaseException:
            self.end()
            raise

    def kill(self) -> None:
        """Kill the process if it runs. Another thread may be asking it: that call fails."""
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> int | None:
        """Kill the process if it runs, wait, and return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # unsent data has no reader
                if pipe is not None:
                    pipe.close()
        return process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start the process, with pipes for its stdin and stdout."""
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = self._spawn()
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        try:
            self.greeting = self._read_line(process, time.monotonic() + self._start_timeout_s, self._start_timeout_s)
        except TimeoutError as error:
            raise GradingError(f"{self._name}'s process was not ready within {self._start_timeout_s} s") from error
        return process

    def _write(self, process: subprocess.Popen[bytes], line: bytes, deadline: float, timeout_s: float) -> None:
        assert process.stdin is not None
        end, rest = process.stdin.fileno(), memoryview(line)
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_WRITE)
            while rest:
                self._wait(selector, deadline, timeout_s)
                rest = rest[os.write(end, rest) :]

    def _read_line(self, process: subprocess.Popen[bytes], deadline: float, timeout_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        read = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not read.endswith(b"\n"):
                self._wait(selector, deadline, timeout_s)
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part or len(read) > self._longest_reply:
                    raise EOFError("it ended" if not part else "its reply is too long")
                read += part
        reply: dict[str, Any] = json.loads(read)
        return reply

    def _wait(self, selector: selectors.BaseSelector, deadline: float, timeout_s: float) -> None:
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"{self._name} did not answer within {timeout_s} s")
