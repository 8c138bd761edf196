"""A pool that many environments share, which is started when the first program is run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from ludic.envs.code_exec.backend import choose_backend, create_sandbox_pool
from ludic.envs.code_exec.bubblewrap import OWN_VERSION
from ludic.envs.code_exec.types import BatchTestResult, Sandbox, SandboxPool

OpenPool = Callable[[], Coroutine[Any, Any, SandboxPool]]
MOST_WORKERS = 16
"""Of those that are chosen by the number of processors."""


class SharedSandboxPool:
    """A SandboxPool that opens another one at the first `checkout`, and counts the time in which
    programs run. After `shutdown` it can be used again."""

    def __init__(self, open_pool: OpenPool, *, python_version: str = OWN_VERSION) -> None:
        """`open_pool` returns a pool that is started."""
        self._open_pool, self._python_version = open_pool, python_version
        self._lock = threading.Lock()
        """For all that follows."""
        self._pool: SandboxPool | None = None
        self._opening: tuple[Future[SandboxPool | None], asyncio.Task[SandboxPool]] | None = None
        """What all who need the pool wait for, and what opens it."""
        self._closing = False
        """Whether it was shut down while it was being opened."""
        self._lent, self._since, self._seconds = 0, 0.0, 0.0

    @classmethod
    def of(cls, pool: SandboxPool) -> SharedSandboxPool:
        """One that starts this pool."""

        async def open_pool() -> SandboxPool:
            await pool.start()
            return pool

        return cls(open_pool, python_version=pool.python_version)

    @property
    def python_version(self) -> str:
        return self._python_version if self._pool is None else self._pool.python_version

    @property
    def available(self) -> int:
        return 0 if self._pool is None else self._pool.available

    @property
    def cache_stats(self) -> dict[str, int]:
        return {} if self._pool is None else self._pool.cache_stats

    @property
    def seconds(self) -> float:
        """Wall time in which at least one sandbox was lent: programs ran."""
        with self._lock:
            return self._seconds + (time.monotonic() - self._since if self._lent else 0.0)

    async def start(self) -> None:
        await self._opened()

    async def checkout(self, timeout_s: float = 30.0) -> Sandbox:
        """A sandbox that is clean. `timeout_s` includes the opening, which goes on after it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline) as limit:
                pool = await self._opened()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"the sandboxes did not start within {timeout_s} s; raise timeout_s") from error
        sandbox = await pool.checkout(timeout_s=max(0.0, deadline - loop.time()))
        with self._lock:
            if self._lent == 0:
                self._since = time.monotonic()
            self._lent += 1
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        with self._lock:
            self._lent -= 1
            if self._lent == 0:
                self._seconds += time.monotonic() - self._since
            pool = self._pool
        if pool is not None:  # else shut down meanwhile, which has ended it
            await pool.release(sandbox)

    async def shutdown(self) -> None:
        """End all sandboxes. An opening is cancelled first, and whoever waits for it is told so."""
        with self._lock:
            opening = self._opening
            self._closing = opening is not None
        if opening is not None:
            opened, task = opening
            task.get_loop().call_soon_threadsafe(task.cancel)
            with contextlib.suppress(Exception):
                await asyncio.shield(asyncio.wrap_future(opened))
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            await pool.shutdown()

    def get_cached(self, code_hash: str, tests_hash: str) -> BatchTestResult | None:
        return None if self._pool is None else self._pool.get_cached(code_hash, tests_hash)

    def put_cached(self, code_hash: str, tests_hash: str, result: BatchTestResult) -> None:
        if self._pool is not None:
            self._pool.put_cached(code_hash, tests_hash, result)

    async def _opened(self) -> SandboxPool:
        """The other pool. Whoever asks while it is being opened waits for that, and shares its
        error."""
        while True:
            with self._lock:
                if self._pool is not None:
                    return self._pool
                if self._opening is None:
                    opened: Future[SandboxPool | None] = Future()
                    task = asyncio.ensure_future(self._open_pool())
                    task.add_done_callback(self._settle)
                    self._opening = (opened, task)
                opened = self._opening[0]
            if (pool := await asyncio.shield(asyncio.wrap_future(opened))) is not None:
                return pool

    def _settle(self, task: asyncio.Task[SandboxPool]) -> None:
        failure = None if task.cancelled() else task.exception()
        pool = None if task.cancelled() or failure is not None else task.result()
        with self._lock:
            assert self._opening is not None
            opened, self._opening, self._pool = self._opening[0], None, pool
            closing, self._closing = self._closing, False
        if closing:
            failure = failure or RuntimeError("the sandboxes were shut down while they started")
        if failure is not None:
            opened.set_exception(failure)
        else:
            opened.set_result(pool)  # None: the event loop that opened it has ended, and another one may


def share_sandboxes(n_workers: int | None = None, backend: str = "auto") -> SharedSandboxPool:
    """The sandboxes of a task or a reward function: `n_workers`, by default one a processor. Raises
    immediately if `backend` is unknown (ConfigError) or does not work here (NoSandboxError)."""
    workers = n_workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    chosen = choose_backend(backend)
    return SharedSandboxPool(lambda: create_sandbox_pool(workers, chosen, python_version=None))
