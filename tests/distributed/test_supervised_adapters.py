"""Servers that are given adapters and restarted at any moment: no sample is of other adapters than
its version says, and none is of the base model."""

import asyncio
import copy
import random
import threading
from contextlib import ExitStack

import pytest
import torch
from stub_policy_server import StubPolicyServer, ids_of
from stub_weight_server import refuse
from tiny_policy import make_tiny_policy, tiny_tokenizer

from ludic.distributed.adapters import supervised
from ludic.distributed.adapters.lora import SupervisedAdapters, pack_adapter
from ludic.errors import PublishError
from ludic.inference import SamplingParams, VLLMChatClient
from ludic.inference.servers.pool import Restarts
from ludic.models.lora import LoraSettings, apply_lora, collect_adapter_weights
from ludic.runs.servers import kept_current

DEADLINE_S = 60.0
"""For an event that comes within milliseconds on an idle machine."""
MODEL = apply_lora(copy.deepcopy(make_tiny_policy()), LoraSettings(rank=2, target_modules=["q_proj"]))
ADAPTERS = {
    version: {name: torch.full_like(tensor, version + 1.0) for name, tensor in collect_adapter_weights(MODEL).items()}
    for version in range(9)
}


class Fleet:
    """Servers, their client and their publisher."""

    def __init__(self, folder, servers):
        self.folder, self.servers, self.urls = folder, servers, [server.url for server in servers]
        self.client = VLLMChatClient(urls=self.urls, tokenizer=tiny_tokenizer(), timeout_s=DEADLINE_S, backoff_s=0.0)
        self.client.follow_restarts(Restarts(self.urls.__getitem__, rest_s=0.0, look_s=0.001))
        self.publisher = self.make_publisher()

    def make_publisher(self, timeout_s=DEADLINE_S):
        options = {"count": len(self.urls), "find_url": self.urls.__getitem__, "headers": {}, "timeout_s": timeout_s}
        return SupervisedAdapters(self.client, self.folder, model=MODEL, run="first", **options)

    async def sample(self):
        """(version, sampled ids)."""
        sampled = await self.client.sample_tokens([1, 2, 3], sampling=SamplingParams(max_tokens=4), seed=0)
        return sampled.policy_version, list(sampled.trace.completion_token_ids)


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setattr(supervised, "RETRY_S", 0.001)
    with ExitStack() as stack:

        def start(count):
            folders = [tmp_path / f"server{number}" for number in range(count)]
            fleet = Fleet(tmp_path, [stack.enter_context(StubPolicyServer(folder)) for folder in folders])
            stack.callback(fleet.publisher.close)
            return fleet

        yield start


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (2, 1)])
async def test_no_sample_is_of_other_adapters_than_its_version_says(fleet, count, seed):
    """Servers are restarted between two steps, while samples are drawn, and while adapters are
    sent and loaded."""
    fleet, rng, drawn = fleet(count), random.Random(seed), []

    async def draw(least):
        version, ids = await fleet.sample()
        drawn.append((least, version, ids))

    def restart_in_a_push(*_):
        if rng.random() < 0.2:
            threading.Thread(target=rng.choice(fleet.servers).restart).start()

    for server in fleet.servers:
        server.faults |= {"/ludic/adapters": restart_in_a_push, "/v1/load_lora_adapter": restart_in_a_push}
    async with fleet.client:
        with kept_current(fleet.publisher, every_s=0.001):
            for version in range(5):
                await fleet.publisher.publish(ADAPTERS[version], version)
                if rng.random() < 0.7:
                    rng.choice(fleet.servers).restart()
                drawing = [asyncio.create_task(draw(version)) for _ in range(8)]
                await asyncio.sleep(0)
                if rng.random() < 0.5:
                    rng.choice(fleet.servers).restart()
                await asyncio.gather(*drawing)
    assert len(drawn) == 40
    for least, version, ids in drawn:
        assert version >= least
        assert ids == ids_of(ADAPTERS[version])


async def test_a_trainer_killed_in_a_push_leaves_one_version_and_the_resumed_one_replaces_it(fleet):
    """The first trainer ends when one of two servers has version 2, which no client asks for yet;
    the resumed one has other adapters as version 2."""
    fleet = fleet(2)
    async with fleet.client:
        await fleet.publisher.publish(ADAPTERS[1], 1)
        fleet.publisher._servers[0].life().load(pack_adapter(MODEL, ADAPTERS[2], "first@2"))  # and is killed
        assert [list(server.adapters) for server in fleet.servers] == [["first@1", "first@2"], ["first@1"]]
        assert [await fleet.sample() for _ in range(4)] == [(1, ids_of(ADAPTERS[1]))] * 4
        await fleet.make_publisher().publish(ADAPTERS[7], 2)
        assert [await fleet.sample() for _ in range(4)] == [(2, ids_of(ADAPTERS[7]))] * 4
        assert [list(server.adapters) for server in fleet.servers] == [["first@1", "first@2"]] * 2


async def test_an_actor_samples_with_the_version_that_it_needs_or_the_latest(fleet):
    fleet = fleet(1)
    actor = Fleet(fleet.folder, fleet.servers)
    async with fleet.client, actor.client:
        await fleet.publisher.publish(ADAPTERS[1], 1)
        actor.client.require_version(2)
        assert not await actor.client.has_version(2, "first")
        for version in (2, 3):
            await fleet.publisher.publish(ADAPTERS[version], version)
        assert not await actor.client.has_version(2, "second")
        assert await actor.client.has_version(2, "first")
        assert await actor.sample() == (2, ids_of(ADAPTERS[2]))
        await fleet.publisher.publish(ADAPTERS[4], 4)  # version 2 is unloaded
        assert await actor.sample() == (4, ids_of(ADAPTERS[4]))
        actor.client.require_version(2)
        assert await actor.client.has_version(2, "first")  # a later one
        assert await actor.sample() == (3, ids_of(ADAPTERS[3]))


async def test_without_a_server_that_takes_the_adapters_the_run_ends_with_the_reason(fleet):
    fleet = fleet(1)
    fleet.servers[0].faults["/v1/load_lora_adapter"] = refuse("LoRA rank 2 is greater than max_lora_rank", status=400)
    with pytest.raises(PublishError, match=r"version 1 was not published .*max_lora_rank"):
        await fleet.make_publisher(timeout_s=0.0).publish(ADAPTERS[1], 1)
