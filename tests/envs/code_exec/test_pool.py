import asyncio
import inspect

import pytest
from fake_sandboxes import FakePool, Scripted
from jumping_loop import play_jumping

from ludic.envs.code_exec.backend import UnsafeSubprocessPool
from ludic.envs.code_exec.bubblewrap import BubblewrapSandboxPool
from ludic.envs.code_exec.pool import BaseSandboxPool
from ludic.envs.code_exec.types import (
    BatchTestResult,
    CompileResult,
    CompileStatus,
    ExecutionResult,
    RunStatus,
    SandboxPool,
    SandboxPoolExhaustedError,
    TestCase,
    TestResult,
)
from ludic.errors import ConfigError, GradingError


def in_loop(play, *arguments, **settings):
    async def main():
        pool = FakePool(*arguments, **settings)
        await pool.start()
        await play(pool)
        await pool.shutdown()
        assert all(sandbox.stopped for sandbox in pool.made)
        return pool

    return play_jumping(main())


def test_sandboxes_are_lent_reset_and_lent_again():
    async def play(pool):
        assert isinstance(pool, SandboxPool)
        assert pool.available == 2
        first, second = await pool.checkout(), await pool.checkout()
        assert first is not second
        assert pool.available == 0
        await pool.release(first)
        assert pool.pending_resets
        await pool.drain_pending_resets()
        assert (pool.available, pool.pending_resets, first.resets) == (1, 0, 1)
        assert await pool.checkout() is first
        await pool.release(first), await pool.release(second)

    in_loop(play, 2)


def test_those_who_wait_are_served():
    async def play(pool):
        order = []

        async def use(name):
            sandbox = await pool.checkout(timeout_s=60)
            order.append(name)
            await asyncio.sleep(0)
            await pool.release(sandbox)

        await asyncio.gather(*(use(number) for number in range(20)))
        assert sorted(order) == list(range(20))

    assert len(in_loop(play, 3).made) == 3


def test_a_pool_that_is_not_started_says_so():
    with pytest.raises(RuntimeError, match="the pool is not started"):
        asyncio.run(FakePool(1).checkout())


def test_starvation_is_an_error_with_the_numbers():
    async def play(pool):
        sandbox = await pool.checkout()
        with pytest.raises(TimeoutError, match=r"no sandbox .*0\.01 s: 1 of 1 .*use"):
            await pool.checkout(timeout_s=0.01)
        await pool.release(sandbox)
        assert await pool.checkout(timeout_s=60) is sandbox  # who gave up has left the queue

    in_loop(play, 1)


def test_a_sandbox_is_released_once_and_to_its_own_pool():
    async def play(pool):
        with pytest.raises(ConfigError, match="not lent by this pool"):
            await pool.release(Scripted())
        sandbox = await pool.checkout()
        await pool.release(sandbox)
        with pytest.raises(ConfigError, match="not lent by this pool"):
            await pool.release(sandbox)

    in_loop(play, 1)


def test_one_that_cannot_be_reset_is_replaced():
    async def play(pool):
        sandbox = await pool.checkout()
        sandbox.reset_failures, pool.start_failures = 1, 2
        await pool.release(sandbox)
        await pool.drain_pending_resets()
        assert sandbox.stopped
        assert pool.available == 1
        assert await pool.checkout() is pool.made[1]

    in_loop(play, 1, max_consecutive_failures=4)


def test_successes_close_the_circuit_again():
    async def play(pool):
        for _ in range(6):  # three failures in all between two successes
            sandbox = await pool.checkout()
            sandbox.reset_failures, pool.start_failures = 1, 2
            await pool.release(sandbox)
            await pool.drain_pending_resets()

    assert len(in_loop(play, 1, max_consecutive_failures=4).made) == 7


def test_a_pool_that_cannot_replace_a_sandbox_gives_up_and_says_why():
    async def play(pool):
        sandbox = await pool.checkout()
        sandbox.reset_failures, pool.start_failures = 1, 99
        waiting = asyncio.create_task(pool.checkout(timeout_s=60))
        await asyncio.sleep(0)
        await pool.release(sandbox)
        with pytest.raises(SandboxPoolExhaustedError, match=r"3 failures in a row.*start: OSError: no room"):
            await waiting
        with pytest.raises(GradingError):  # so an episode fails, and has no reward
            await pool.checkout()

    in_loop(play, 1, max_consecutive_failures=3)


@pytest.mark.parametrize(("away_s", "is_served"), [(2.0, True), (600.0, False)])
def test_a_daemon_that_starts_again_is_waited_for(away_s, is_served):
    """All sandboxes fail at once, and so does every start while it is away."""
    ended_at = []

    class Away(FakePool):
        async def _start_sandbox(self):
            if len(self.made) >= 4 and asyncio.get_running_loop().time() < away_s:
                raise OSError("no daemon")
            return await super()._start_sandbox()

    async def main():
        pool = Away(4)
        await pool.start()
        for sandbox in [await pool.checkout() for _ in range(4)]:
            sandbox.reset_failures = 1
            await pool.release(sandbox)
        if is_served:
            await pool.drain_pending_resets()
            assert pool.available == 4
        else:
            with pytest.raises(SandboxPoolExhaustedError, match="5 failures in a row"):
                await pool.checkout(timeout_s=60)
        ended_at.append(asyncio.get_running_loop().time())
        await pool.shutdown()

    play_jumping(main())
    assert ended_at == [3.0 if is_served else 7.0]  # waits of 1 and 2 s; and of 4 s


def test_the_last_sandbox_that_is_not_replaced_ends_the_pool():
    async def play(pool):
        for sandbox in [await pool.checkout(), await pool.checkout()]:
            sandbox.reset_failures = 1
            await pool.release(sandbox)
        with pytest.raises(SandboxPoolExhaustedError, match="the last: reset: OSError: sandbox"):
            await pool.checkout(timeout_s=60)

    in_loop(play, 2, auto_replace_failed=False)


def test_a_loop_that_ends_during_a_reset_leaves_the_sandbox_to_the_next_loop():
    pool = FakePool(1)

    async def use(hangs):
        await pool.start()
        sandbox = await pool.checkout(timeout_s=60)
        sandbox.reset_hangs = hangs
        await pool.release(sandbox)
        await asyncio.sleep(0)

    asyncio.run(use(hangs=True))
    pool.made[0].reset_hangs = False
    assert (pool.available, pool.pending_resets) == (0, 1)
    asyncio.run(use(hangs=False))
    assert (pool.available, len(pool.made), pool.made[0].resets) == (1, 1, 2)


def test_a_start_that_fails_leaves_nothing():
    pool = FakePool(3)
    pool.start_failures = 1
    with pytest.raises(OSError, match="no room"):
        asyncio.run(pool.start())
    assert len(pool.made) == 2
    assert all(sandbox.stopped for sandbox in pool.made)


def test_results_of_sandboxes_that_failed_are_not_kept():
    pool = FakePool(1)
    for name, status in [("good", RunStatus.RUNTIME_ERROR), ("bad", RunStatus.SANDBOX_ERROR)]:
        execution = ExecutionResult(CompileResult(CompileStatus.SUCCESS), status)
        pool.put_cached(name, "t", BatchTestResult([TestResult(TestCase("", ""), False, None, execution)], name, "t"))
    assert pool.get_cached("good", "t") is not None
    assert pool.get_cached("bad", "t") is None
    assert pool.cache_stats["size"] == 1


@pytest.mark.parametrize("name", ["n_workers", "max_consecutive_failures", "max_concurrent_ops", "cache_size"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ConfigError, match=r"\(0\) must be at least 1"):
        FakePool(**{name: 0})


def test_a_caller_who_gives_up_when_it_is_woken_wakes_the_next():
    async def play(pool):
        sandbox = await pool.checkout()
        first, second = (asyncio.create_task(pool.checkout(timeout_s=60)) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await pool.release(sandbox)
        while not pool.available:  # until the sandbox is clean, and `first` has been told
            await asyncio.sleep(0)
        first.cancel()
        assert await second is sandbox

    in_loop(play, 1)


def test_two_starts_are_one():
    async def main():
        pool = FakePool(3)
        await asyncio.gather(pool.start(), pool.start())
        assert pool.available == len(pool.made) == 3
        await pool.shutdown()

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_nothing():
    class Slow(FakePool):
        async def _start_sandbox(self):
            sandbox = await super()._start_sandbox()
            if len(self.made) == 3:
                await asyncio.sleep(3600)
            return sandbox

    async def main():
        pool = Slow(3)
        task = asyncio.create_task(pool.start())
        while len(pool.made) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [sandbox.stopped for sandbox in pool.made] == [True, True, False]
        with pytest.raises(RuntimeError, match="not started"):
            await pool.checkout()

    asyncio.run(main())


def test_releases_in_a_row_are_all_reset():
    async def play(pool):
        for _ in range(5):
            sandbox = await pool.checkout(timeout_s=60)
            await pool.release(sandbox)

    in_loop(play, 1, max_concurrent_ops=1)


def test_a_sandbox_that_outlives_its_pool_is_given_back_without_an_error():
    async def main():
        pool = FakePool(1)
        await pool.start()
        sandbox = await pool.checkout()
        await pool.shutdown()
        await pool.release(sandbox)
        assert sandbox.stopped

    asyncio.run(main())


def test_a_pool_takes_the_arguments_of_every_pool_in_their_order():
    """`BaseSandboxPool` and the pools of containers take them so too."""
    base = list(inspect.signature(BaseSandboxPool).parameters)
    for pool in (BubblewrapSandboxPool, UnsafeSubprocessPool):
        assert list(inspect.signature(pool).parameters)[2:] == base[1:]
