"""A pool that many environments share."""

import asyncio

import pytest
from fake_sandboxes import FakePool
from jumping_loop import play_jumping

from ludic.envs.code_exec import shared_pool
from ludic.envs.code_exec.shared_pool import SharedSandboxPool, share_sandboxes
from ludic.envs.code_exec.types import SandboxPool
from ludic.errors import LudicError


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


def test_all_who_wait_share_the_error_of_an_opening():
    opened = []

    async def open_pool():
        opened.append(1)
        await asyncio.sleep(60)
        raise OSError("no room")

    async def main():
        shared = SharedSandboxPool(open_pool)
        return await asyncio.gather(*(shared.checkout(timeout_s=90) for _ in range(5)), return_exceptions=True)

    assert [str(error) for error in play_jumping(main())] == ["no room"] * 5
    assert len(opened) == 1


def test_a_checkout_does_not_wait_longer_for_the_opening_which_goes_on():
    pool, opened = FakePool(1), []

    async def open_pool():
        opened.append(1)
        await asyncio.sleep(60)
        await pool.start()
        return pool

    async def main():
        shared, loop = SharedSandboxPool(open_pool), asyncio.get_running_loop()
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"did not start within 20 s"):
                await shared.checkout(timeout_s=20)
        assert loop.time() == 40.0
        sandbox = await shared.checkout(timeout_s=30)
        assert (loop.time(), len(opened)) == (60.0, 1)
        with pytest.raises(TimeoutError, match="no sandbox was free"):
            await shared.checkout(timeout_s=5)
        assert loop.time() == 65.0
        await shared.release(sandbox)
        await shared.shutdown()

    play_jumping(main())


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_shutdown_during_the_opening_leaves_nothing_running(stubborn):
    pool, started = FakePool(2), []

    async def open_pool():
        await pool.start()
        try:
            started.append(1)
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if not stubborn:  # else it opens all the same
                await pool.shutdown()
                raise
        return pool

    async def main():
        shared = SharedSandboxPool(open_pool)
        waiting = asyncio.ensure_future(shared.checkout(timeout_s=60))
        while not started:
            await asyncio.sleep(0)
        await shared.shutdown()
        assert len(pool.made) == 2
        assert all(sandbox.stopped for sandbox in pool.made)
        with pytest.raises(RuntimeError, match="shut down while they started"):
            await waiting

    play_jumping(main())


def test_an_opening_that_ends_with_its_event_loop_is_done_again():
    pool, opened = FakePool(1), []

    async def open_pool():
        opened.append(1)
        if len(opened) == 1:
            await asyncio.sleep(3600)
        await pool.start()
        return pool

    shared = SharedSandboxPool(open_pool)

    async def give_up():
        starting = asyncio.ensure_future(shared.start())
        while not opened:
            await asyncio.sleep(0)
        assert not starting.done()

    play_jumping(give_up())
    play_jumping(shared.start())
    assert (len(opened), shared.available) == (2, 1)


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
    with pytest.raises(RuntimeError, match=r"No sandbox backend.*apt install bubblewrap"):
        share_sandboxes()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("bubblewarp", r"Unknown backend 'bubblewarp'; .*one of auto, bubblewrap"),
        ("bubblewrap", r"bubblewrap does not work .*apt install bubblewrap"),
        ("docker", r"docker does not work .*Docker daemon"),
        ("podman-hpc", r"podman-hpc does not work here"),
        ("singularity", r"Singularity backend is not yet implemented"),
    ],
)
def test_a_backend_that_cannot_work_is_refused_before_a_program_runs(monkeypatch, backend, message):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    with pytest.raises(LudicError, match=message):
        share_sandboxes(2, backend)
    assert share_sandboxes(2, "unsafe_subprocess").available == 0
