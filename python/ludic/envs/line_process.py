"""A child process that answers each JSON line with a JSON line, and is killed at a deadline; and a
pool of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import select
import selectors
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Protocol, TypeVar

from ludic.errors import GradingError, check_value
from ludic.event_loop import describe_error

T = TypeVar("T")

LONGEST_REPLY = 1 << 20
"""Bytes."""
LAST_WORDS = 500
"""Characters of stderr in an error."""


class Running(Protocol):
    """The members of `subprocess.Popen` that are used."""

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def kill(self) -> None:
        """End it, without waiting. For any thread, and also if it has ended."""

    def wait(self) -> int: ...


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
        self._process: Running | None = None
        self._stderr: IO[bytes] | None = None
        self._last_words = ""
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
            raise GradingError(f"{self._name} failed (exit status {code}): {describe_error(error)}{self._last_words}") from error
        except BaseException:
            self.end()
            raise

    def is_silent(self) -> bool:
        """Whether the process runs, as far as is known without waiting, and has written nothing
        without a request."""
        if self._process is None or self._process.stdout is None:
            return False
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        return not poll.poll(0)

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
        try:
            _close(process.stdin)
            return process.wait()
        finally:
            _close(process.stdout)  # what it still writes has had a reader
            self._keep_last_words()

    def _spawn(self) -> Running:
        """Start the process, with pipes for its stdin and stdout."""
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def _new_stderr(self) -> IO[bytes]:
        """A file for the stderr of a process that starts; its last lines are part of the errors."""
        self._keep_last_words()
        self._stderr, self._last_words = tempfile.TemporaryFile(), ""  # noqa: SIM115
        return self._stderr

    def _keep_last_words(self) -> None:
        """Of stderr, for an error's message."""
        if self._stderr is not None:
            with self._stderr as file:
                file.seek(0)
                text = file.read().decode(errors="replace").strip()
            self._stderr, self._last_words = None, f"; it said: {text[-LAST_WORDS:]}" if text else ""

    def _payload(self, part: bytes) -> bytes:
        """The bytes of the process's stdout in what was read."""
        return part

    def _start(self) -> Running:
        process = self._process = self._spawn()
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        try:
            self.greeting = self._read_line(process, time.monotonic() + self._start_timeout_s, self._start_timeout_s)
        except TimeoutError as error:
            self.end()
            raise GradingError(f"{self._name} was not ready within {self._start_timeout_s} s{self._last_words}") from error
        return process

    def _write(self, process: Running, line: bytes, deadline: float, timeout_s: float) -> None:
        assert process.stdin is not None
        rest = memoryview(line)
        with _held(process.stdin) as end, selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_WRITE)
            while rest:
                self._wait(selector, deadline, timeout_s)
                rest = rest[os.write(end, rest) :]

    def _read_line(self, process: Running, deadline: float, timeout_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        read = bytearray()
        with _held(process.stdout) as end, selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_READ)
            while not read.endswith(b"\n"):
                self._wait(selector, deadline, timeout_s)
                part = os.read(end, 1 << 16)
                if not part or len(read) > self._longest_reply:
                    raise EOFError("it ended" if not part else "its reply is too long")
                read += self._payload(part)
        reply: dict[str, Any] = json.loads(read)
        return reply

    def _wait(self, selector: selectors.BaseSelector, deadline: float, timeout_s: float) -> None:
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"{self._name} did not answer within {timeout_s} s")


@dataclass
class GraderCounts:
    """Counts of all answers so far."""

    graded: int = 0
    """With a verdict."""
    failed: int = 0
    """The grader raised, or its process died."""
    timed_out: int = 0


class LineProcessPool:
    """Several equal processes, each asked by one thread at a time. They start at their first
    request (`workers` of them; None means one for each core, at most 8), and end with the pool."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = 5.0,
        workers: int | None = None,
        start_timeout_s: float = 60.0,
        name: str = "the grader",
    ) -> None:
        workers = min(8, os.cpu_count() or 1) if workers is None else workers
        check_value("timeout_s", timeout_s, above=0)
        check_value("workers", workers, least=1)
        self.timeout_s = timeout_s
        self.counts = GraderCounts()
        self._counting = threading.Lock()
        processes = [LineProcess(command, start_timeout_s=start_timeout_s, name=name) for _ in range(workers)]
        self._idle: queue.LifoQueue[LineProcess] = queue.LifoQueue()
        for process in processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="line-process")
        self._end = weakref.finalize(self, _end_all, processes, self._threads)

    def ask(self, request: Mapping[str, Any], what: str) -> dict[str, Any]:
        """The reply to `request`. Raises GradingError, which says `what` was asked; it is counted.
        The deadline starts when a process is free."""
        process = self._idle.get()
        try:
            return process.ask(request, timeout_s=self.timeout_s)
        except TimeoutError as error:
            self._count("timed_out")
            raise GradingError(f"it took longer than {self.timeout_s} s: {what}") from error
        except GradingError:
            self._count("failed")
            raise
        finally:
            self._idle.put(process)

    def check(self, reply: Mapping[str, Any], key: str, kind: type, what: str) -> Any:
        """The value of `key`, which is a verdict of this `kind`. Raises GradingError for a reply
        without one, such as `{"error": "..."}`."""
        if not isinstance(reply.get(key), kind):
            self._count("failed")
            raise GradingError(f"{reply.get('error', reply)}: {what}")
        self._count("graded")
        return reply[key]

    async def run_in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function`, which asks, in a thread of the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        """End the processes."""
        self._end()

    def _count(self, ending: str) -> None:
        """One more answer that ended like this: a field of `GraderCounts`."""
        with self._counting:
            setattr(self.counts, ending, getattr(self.counts, ending) + 1)


async def gather_verdicts(asked: Iterable[Awaitable[T]]) -> list[T | GradingError]:
    """The verdict, or the GradingError, of each. Raises any other error after all have ended."""
    verdicts = await asyncio.gather(*asked, return_exceptions=True)
    for verdict in verdicts:
        if isinstance(verdict, BaseException) and not isinstance(verdict, GradingError):
            raise verdict
    return verdicts  # type: ignore[return-value]


def _end_all(processes: Sequence[LineProcess], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.end()


@contextlib.contextmanager
def _held(end: IO[bytes]) -> Iterator[int]:
    """A descriptor of `end` that stays open while another thread closes it: a selector forgets one
    that is closed, and would not see that the process has ended."""
    descriptor = os.dup(end.fileno())
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _close(end: IO[bytes] | None) -> None:
    with contextlib.suppress(OSError):  # unsent data has no reader
        if end is not None:
            end.close()
