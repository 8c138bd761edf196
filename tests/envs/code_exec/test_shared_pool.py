"""A pool that many environments share."""

import asyncio

import pytest
from fake_sandboxes import FakePool

from ludic.envs.code_exec import shared_pool
from ludic.envs.code_exec.sandbox import SandboxPool
from ludic.envs.code_exec.shared_pool import SharedSandboxPool, share_sandboxes


def test_it_starts_the_pool_once_when_it_is_first_needed():
    pool, opened = FakePool(2), []

    async def open_pool():
        opened.append(1)
        await asyncio.sleep(0)
        await pool.start()
        return pool

    shared = SharedSandboxPool(open_pool)
    assert isinstance(shared, SandboxPool)
    assert (shared.available, shared.cache_stats, shared.get_cached("a", "b")) == (0, {}, None)

    async def use():
        sandbox = await shared.checkout()
        await shared.release(sandbox)

    async def main():
        await asyncio.gather(*(use() for _ in range(5)))

    asyncio.run(main())
    asyncio.run(main())  # of another loop
    assert len(opened) == 1
    asyncio.run(shared.shutdown())
    assert all(sandbox.stopped for sandbox in pool.made)


def test_a_pool_that_does_not_start_is_tried_again():
    pool = FakePool(1)
    pool.start_failures = 1
    shared = SharedSandboxPool.of(pool)
    with pytest.raises(OSError, match="no room"):
        asyncio.run(shared.start())
    asyncio.run(shared.start())
    assert shared.available == 1


def test_the_time_counts_in_which_some_sandbox_is_lent(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(shared_pool.time, "monotonic", lambda: now[0])
    shared = SharedSandboxPool.of(FakePool(2))

    async def main():
        await shared.start()
        one = await shared.checkout()
        now[0] = 1.0
        other = await shared.checkout()
        now[0] = 3.0
        await shared.release(one)
        now[0] = 6.0
        assert shared.seconds == 6.0
        await shared.release(other)
        now[0] = 100.0
        assert shared.seconds == 6.0

    asyncio.run(main())


def test_without_a_backend_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    with pytest.raises(RuntimeError, match=r"No sandbox backend available.*apt install bubblewrap"):
        share_sandboxes()
