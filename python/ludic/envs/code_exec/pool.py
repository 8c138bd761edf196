"""Lends sandboxes, resets them in the background, replaces those that fail, and keeps the results
of programs that were judged before."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from ludic.envs.code_exec.types import BatchTestResult, Sandbox, SandboxPoolExhaustedError
from ludic.errors import ConfigError, check_value

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 1.0
"""Before a start that follows a failed one. It doubles with each."""
LONGEST_WAIT_S = 30.0


class LRUCache:
    """The `max_size` results that were used last, by the hashes of code and tests. For any number
    of threads."""

    def __init__(self, max_size: int = 10_000) -> None:
        check_value("max_size", max_size, least=1)
        self._max_size = max_size
        self._results: OrderedDict[tuple[str, str], BatchTestResult] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = self._misses = 0

    def get(self, code_hash: str, tests_hash: str) -> BatchTestResult | None:
        with self._lock:
            result = self._results.get((code_hash, tests_hash))
            if result is None:
                self._misses += 1
                return None
            self._hits += 1
            self._results.move_to_end((code_hash, tests_hash))
            return result

    def put(self, code_hash: str, tests_hash: str, result: BatchTestResult) -> None:
        with self._lock:
            self._results[code_hash, tests_hash] = result
            self._results.move_to_end((code_hash, tests_hash))
            if len(self._results) > self._max_size:
                self._results.popitem(last=False)

    def clear(self) -> None:
        """Forget all results; the counts stay."""
        with self._lock:
            self._results.clear()

    @property
    def stats(self) -> dict[str, int]:
        """`hits`, `misses`, `size` and `max_size`."""
        with self._lock:
            return {"hits": self._hits, "misses": self._misses, "size": len(self._results), "max_size": self._max_size}

    @property
    def hit_rate(self) -> float:
        """Hits / calls of `get`; 0 before the first."""
        with self._lock:
            calls = self._hits + self._misses
            return self._hits / calls if calls else 0.0


class BaseSandboxPool(ABC):
    """A pool of `n_workers` sandboxes. A backend implements `_start_sandbox` and `python_version`.

    `release` returns without waiting; the sandbox is reset in the background, at most
    `max_concurrent_ops` at the same time. One that cannot be reset is stopped and, if
    `auto_replace_failed`, replaced, with waits of 1, 2, 4 ... s between starts that fail. After
    `max_consecutive_failures` failures with no success between them, where simultaneous failures
    count as one, every `checkout` raises SandboxPoolExhaustedError. Sandboxes are used by any
    number of event loops, one after another.
    """

    def __init__(
        self,
        n_workers: int = 4,
        cache_size: int = 10_000,
        auto_replace_failed: bool = True,
        max_consecutive_failures: int = 5,
        max_concurrent_ops: int = 8,
    ) -> None:
        for name, value in {
            "n_workers": n_workers,
            "max_consecutive_failures": max_consecutive_failures,
            "max_concurrent_ops": max_concurrent_ops,
        }.items():
            check_value(name, value, least=1)
        self._n_workers, self._auto_replace_failed = n_workers, auto_replace_failed
        self._max_consecutive_failures, self._max_concurrent_ops = max_consecutive_failures, max_concurrent_ops
        self._cache = LRUCache(cache_size)
        self._lock = threading.Lock()
        """For all that follows."""
        self._idle: deque[Sandbox] = deque()
        self._used: deque[Sandbox] = deque()
        """Released, and not yet reset."""
        self._lent: list[Sandbox] = []
        self._waiting: deque[Future[None]] = deque()
        """Callers of `checkout`, each woken when there may be a sandbox for it."""
        self._resetting: list[tuple[asyncio.AbstractEventLoop, Sandbox]] = []
        """And by whom. A loop that is closed leaves them, unfinished."""
        self._resets: set[asyncio.Task[None]] = set()
        self._failures, self._last_failure = 0, ""
        self._started = False
        self._starting: Future[None] | None = None

    @property
    @abstractmethod
    def python_version(self) -> str: ...

    @abstractmethod
    async def _start_sandbox(self) -> Sandbox:
        """Start one sandbox; an error means that it did not start, and nothing is left of it."""

    @property
    def available(self) -> int:
        return len(self._idle)

    @property
    def pending_resets(self) -> int:
        """Sandboxes that were released and are not yet reset."""
        return len(self._used) + len(self._resetting)

    @property
    def cache_stats(self) -> dict[str, int]:
        return self._cache.stats

    async def start(self) -> None:
        """Start all sandboxes, or none: the error of one that does not start is raised. A second
        call waits for the first."""
        with self._lock:
            other = self._starting
            if self._started:
                return None
            if other is None:
                self._starting = Future()
        if other is not None:
            await asyncio.shield(asyncio.wrap_future(other))
            return await self.start()
        try:
            await self._start_all()
        finally:
            with self._lock:
                starting, self._starting = self._starting, None
            assert starting is not None
            starting.set_result(None)

    async def _start_all(self) -> None:
        tasks = [asyncio.ensure_future(self._start_sandbox()) for _ in range(self._n_workers)]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._end_all(tasks)
            raise
        failures = [task for task in tasks if task.cancelled() or task.exception() is not None]
        if failures:
            await self._end_all(tasks)
            failures[0].result()
        with self._lock:
            self._idle.extend(task.result() for task in tasks)
            self._started = True

    async def _end_all(self, tasks: Sequence[asyncio.Future[Sandbox]]) -> None:
        """End the sandboxes of those tasks that have started one."""
        started = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        await asyncio.gather(*(self._end(sandbox) for sandbox in started))

    async def checkout(self, timeout_s: float = 30.0) -> Sandbox:
        """A sandbox that is clean. RuntimeError before `start`, TimeoutError if none is free in
        time, SandboxPoolExhaustedError if the pool has given up."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if (sandbox := await self._take()) is not None:
                        return sandbox
                    await self._wait()
        except TimeoutError as error:
            use = f"{len(self._lent)} of {self._n_workers} are in use, {self.pending_resets} are being reset"
            raise TimeoutError(f"no sandbox was free within {timeout_s} s: {use}; raise n_workers or timeout_s") from error

    async def release(self, sandbox: Sandbox) -> None:
        """Take a sandbox back. It is reset in the background."""
        with self._lock:
            if not self._started:  # shut down meanwhile, which has ended it
                return
            if not any(lent is sandbox for lent in self._lent):
                raise ConfigError("this sandbox is not lent by this pool; release each sandbox once, to its own pool")
            self._lent = [lent for lent in self._lent if lent is not sandbox]
            self._used.append(sandbox)
        self._take_over()
        if sum(not task.done() for task in self._resets) < self._max_concurrent_ops:
            task = asyncio.get_running_loop().create_task(self._reset_used())
            self._resets.add(task)
            task.add_done_callback(self._resets.discard)

    async def drain_pending_resets(self, timeout_s: float = 60.0) -> None:
        """Wait until no released sandbox is left to reset. TimeoutError after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while self.pending_resets:
                self._take_over()
                if self._resets:
                    await asyncio.wait(list(self._resets))
                else:
                    await self._reset_used()

    async def shutdown(self) -> None:
        """End all sandboxes, also those that are lent. The pool can be started again."""
        self._take_over()
        for task in list(self._resets):
            task.cancel()
        if self._resets:
            await asyncio.wait(list(self._resets))
        with self._lock:
            sandboxes = [*self._idle, *self._used, *self._lent]
            for part in (self._idle, self._used, self._lent):
                part.clear()
            self._started, self._failures = False, 0
        await asyncio.gather(*(self._end(sandbox) for sandbox in sandboxes))
        self._wake(len(self._waiting))

    def get_cached(self, code_hash: str, tests_hash: str) -> BatchTestResult | None:
        return self._cache.get(code_hash, tests_hash)

    def put_cached(self, code_hash: str, tests_hash: str, result: BatchTestResult) -> None:
        """Keep a result, unless a sandbox failed in it: that says nothing about the program."""
        if not result.sandbox_failed:
            self._cache.put(code_hash, tests_hash, result)

    async def _take(self) -> Sandbox | None:
        """A clean sandbox, if there is one, or one that was released by a loop that has ended."""
        with self._lock:
            if not self._started:
                raise RuntimeError("the pool is not started; await pool.start() first")
            if self._failures >= self._max_consecutive_failures:
                raise SandboxPoolExhaustedError(
                    f"{self._failures} failures in a row, the last: {self._last_failure}. Mend the cause and start the pool again"
                )
            if self._idle:
                self._lent.append(self._idle.popleft())
                return self._lent[-1]
        self._take_over()
        if self._used and all(task.done() for task in self._resets):
            await self._reset_used()
            return await self._take()
        return None

    def _take_over(self) -> None:
        """Put back the sandboxes whose reset ended with its event loop."""
        with self._lock:
            self._used.extend(sandbox for loop, sandbox in self._resetting if loop.is_closed())
            self._resetting = [(loop, sandbox) for loop, sandbox in self._resetting if not loop.is_closed()]
            self._resets.difference_update([task for task in self._resets if task.get_loop().is_closed()])

    async def _wait(self) -> None:
        """Return when a sandbox may be free."""
        woken: Future[None] = Future()
        with self._lock:
            if self._idle:
                return
            self._waiting.append(woken)
        try:
            await asyncio.wrap_future(woken)
        except asyncio.CancelledError:
            with self._lock, suppress(ValueError):
                self._waiting.remove(woken)
            if woken.done() and not woken.cancelled():
                self._wake()  # the sandbox that it was woken for is another's
            raise

    def _wake(self, count: int = 1) -> None:
        with self._lock:
            woken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        for future in woken:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    async def _reset_used(self) -> None:
        """Reset the released sandboxes one after another, until there is none. One whose reset is
        cancelled stays released."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if not self._used:
                    return
                sandbox = self._used.popleft()
                self._resetting.append((loop, sandbox))
            clean, finished = None, False
            try:
                clean = await self._reset_or_replace(sandbox)
                finished = True
            finally:
                with self._lock:
                    self._resetting = [entry for entry in self._resetting if entry[1] is not sandbox]
                    if clean is not None:
                        self._idle.append(clean)
                    elif not finished:
                        self._used.append(sandbox)
            if clean is not None:
                self._wake()
                continue
            with self._lock:
                if not (self._idle or self._used or self._lent or self._resetting):
                    # Without a sandbox left, no program could ever be served.
                    self._failures = max(self._failures, self._max_consecutive_failures)
            if self._failures >= self._max_consecutive_failures:
                self._wake(len(self._waiting))

    async def _reset_or_replace(self, sandbox: Sandbox) -> Sandbox | None:
        """The sandbox, clean, or another one in its place; None if there is neither."""
        try:
            await sandbox.reset()
            self._failures = 0
            return sandbox
        except Exception as error:
            self._count_failure("reset", error, before=0 if self._auto_replace_failed else self._failures)
        await self._end(sandbox)
        while self._auto_replace_failed and self._failures < self._max_consecutive_failures:
            before = self._failures
            if before > 1:
                await asyncio.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (before - 2)))
            try:
                fresh = await self._start_sandbox()
                self._failures = 0
                return fresh
            except Exception as error:
                self._count_failure("start", error, before)
        return None

    def _count_failure(self, what: str, error: Exception, before: int) -> None:
        """One more than `before`, the failures when this was begun: a daemon that is away fails all
        sandboxes, which counts as one failure."""
        self._failures = max(self._failures, before + 1)
        self._last_failure = f"{what}: {type(error).__name__}: {error}"
        logger.warning("a sandbox failed (%d in a row): %s", self._failures, self._last_failure)

    async def _end(self, sandbox: Sandbox) -> None:
        try:
            if (stop := getattr(sandbox, "stop", None)) is not None:
                await stop()
        except Exception as error:
            logger.warning("a sandbox did not stop: %s: %s", type(error).__name__, error)
