"""A child process that answers each JSON line with a JSON line, and is killed at a deadline."""

from __future__ import annotations

import contextlib
import json
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

    def __init__(self, command: Sequence[str], *, start_timeout_s: float = 60.0) -> None:
        self._command, self._start_timeout_s = list(command), start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply. Raises TimeoutError at the deadline, and
        GradingError if the process dies or its reply is not JSON; in all cases the process is
        killed."""
        try:
            process = self._process or self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            return self._read_line(process, timeout_s)
        except (OSError, EOFError, ValueError) as error:
            code = self.end()
            if isinstance(error, TimeoutError):
                raise
            raise GradingError(f"the grader's process failed (exit status {code}): {type(error).__name__}: {error}") from error
        except BaseException:
            self.end()
            raise

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

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self._read_line(self._process, self._start_timeout_s)
        except TimeoutError as error:
            raise GradingError(f"the grader's process was not ready within {self._start_timeout_s} s") from error
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        deadline, read = time.monotonic() + timeout_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not read.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"the grader did not answer within {timeout_s} s")
                part = process.stdout.read1(65536)  # type: ignore[attr-defined]
                if not part or len(read) > LONGEST_REPLY:
                    raise EOFError("it ended" if not part else "its reply is too long")
                read += part
        reply: dict[str, Any] = json.loads(read)
        return reply
