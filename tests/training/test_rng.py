"""Random generators that keep their state around work that draws."""

import asyncio
import random

import pytest
import torch

from ludic.training.rng import await_preserving_rng


def test_what_awaited_work_draws_changes_no_draws_of_other_tasks_and_undoes_none():
    async def work(pause):
        random.random()
        await pause()
        torch.rand(2)
        return "done"

    async def run_both():
        drawn = []

        async def draw():
            drawn.append(random.random())
            drawn.append(float(torch.rand(())))

        assert await await_preserving_rng(work(draw)) == "done"  # a coroutine that it awaits is part of the work
        before = list(drawn)
        drawn.clear()
        drawing = asyncio.Event()

        async def other():
            await draw()
            drawing.set()

        task = asyncio.ensure_future(other())
        await await_preserving_rng(work(drawing.wait))
        await task
        await draw()
        return before, drawn

    random.seed(3), torch.manual_seed(3)
    expected = [value for _ in range(2) for value in (random.random(), float(torch.rand(())))]
    random.seed(3), torch.manual_seed(3)
    inside, outside = asyncio.run(run_both())
    assert outside == expected
    assert len(inside) == 2


def test_preserved_work_gets_errors_and_cancellation():
    async def fail():
        await asyncio.sleep(0)
        raise ValueError("no")

    async def run():
        with pytest.raises(ValueError, match="no"):
            await await_preserving_rng(fail())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(await_in_task(asyncio.Event()), 0)

    async def await_in_task(event):
        async def wait():
            await event.wait()

        await await_preserving_rng(wait())

    asyncio.run(run())
