"""Actors of a job that start while the queue of their run is still closed."""

import asyncio

import pytest
from jumping_loop import play_jumping
from memory_log import MemoryLog

from ludic.runs.actors.queue import REOPEN_S, wait_until_open
from ludic.training.queue.opening import QueueRetryPolicy


async def here(operation):
    return operation()


@pytest.fixture
def closed():
    log = MemoryLog(lambda: 0.0)
    log.claim("trainer", run="run")
    log.close("trainer")
    return log


def wait(log, *, at, do):
    """(whether the queue is open, seconds waited) if `do` is called after `at` seconds."""

    async def play():
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(at, do, stop)
        is_open = await wait_until_open(log, QueueRetryPolicy(300.0, clock=loop.time, run=here), stop)
        return is_open, loop.time()

    return play_jumping(play())


def test_an_actor_of_a_resumed_job_waits_for_the_trainer_to_open_the_queue(closed):
    is_open, seconds = wait(closed, at=600.0, do=lambda _: closed.claim("resumed", run="run"))
    assert is_open
    assert 600.0 <= seconds <= 601.0


def test_it_ends_when_it_is_stopped_or_when_no_trainer_comes(closed):
    is_open, seconds = wait(closed, at=5.0, do=lambda stop: stop.set())
    assert (is_open, seconds) == (False, pytest.approx(5.0, abs=1.0))
    is_open, seconds = wait(closed, at=2 * REOPEN_S, do=lambda _: None)
    assert (is_open, seconds) == (False, pytest.approx(REOPEN_S, abs=1.0))


def test_an_open_queue_is_not_waited_for():
    log = MemoryLog(lambda: 0.0)
    log.claim("trainer", run="run")
    assert wait(log, at=1.0, do=lambda _: None) == (True, 0.0)
