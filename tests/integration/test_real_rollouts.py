"""A manager of rollouts with a real vLLM server."""

import asyncio
import time

import pytest
from benches.python.over_sampling_vllm import GROUPS, MEMBERS, generate_long, make_client, make_manager, read_metric

from ludic.errors import RolloutAborted

pytestmark = pytest.mark.integration
DEADLINE_S = 120.0


def wait_for_running(url, is_enough):
    """Wait until the number of requests that the server samples is enough."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_enough(running := read_metric(url, "vllm:num_requests_running")):
        assert time.monotonic() < deadline, f"{running} requests run"


def test_an_abort_ends_the_requests_on_the_server(vllm_server):
    """None runs soon, though not all have come to their end."""
    url = vllm_server.url

    async def scenario():
        async with make_client(url) as client:
            manager = make_manager(client, 1.0, 0, generate_fn=generate_long(client))
            waiting = asyncio.create_task(manager.generate_batch())
            await asyncio.to_thread(wait_for_running, url, lambda running: running >= 8)
            manager.request_abort()
            with pytest.raises(RolloutAborted):
                await waiting
            assert len(asyncio.all_tasks()) == 1
            await asyncio.to_thread(wait_for_running, url, lambda running: running == 0)
            return manager.counts

    before = read_metric(url, "vllm:request_success_total", finished_reason="length")
    counts = asyncio.run(scenario())
    assert (counts.owed, counts.lost) == (GROUPS, 0)
    assert read_metric(url, "vllm:request_success_total", finished_reason="length") - before < GROUPS * MEMBERS
    assert read_metric(url, "vllm:num_requests_waiting") == 0
