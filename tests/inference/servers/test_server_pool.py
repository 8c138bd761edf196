"""Several servers behind one client: routing, and what happens when a server dies or returns."""

import asyncio
from contextlib import ExitStack

import pytest
from faulty_server import CUT
from stub_vllm import StubVLLM
from stub_vllm_sampling import COMPLETIONS, GENERATE
from tiny_policy import tiny_tokenizer

from ludic.errors import ConfigError, EngineDeadError, InferenceError, ServerUnreachableError
from ludic.inference import SamplingParams, VLLMChatClient
from ludic.inference.servers.pool import ServerPool
from ludic.inference.servers.server import Server


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def pool_of(count, probe=None):
    clock = Clock()
    pool = ServerPool([Server(f"http://s{i}") for i in range(count)], probe=probe, rest_s=30.0, clock=clock)
    return pool, clock


async def test_each_request_goes_to_the_least_loaded_server():
    pool, _ = pool_of(3)
    release = {server.url: asyncio.Event() for server in pool.servers}
    taken = []

    async def call(server):
        taken.append(server.url)
        await release[server.url].wait()

    tasks = [asyncio.create_task(pool.send(call)) for _ in range(6)]
    while len(taken) < 6:
        await asyncio.sleep(0)
    assert sorted(taken) == ["http://s0", "http://s0", "http://s1", "http://s1", "http://s2", "http://s2"]
    release["http://s1"].set()
    while pool.servers[1].in_flight:
        await asyncio.sleep(0)
    tasks += [asyncio.create_task(pool.send(call)) for _ in range(2)]
    while len(taken) < 8:
        await asyncio.sleep(0)
    assert taken[6:] == ["http://s1", "http://s1"]  # it is idle, whatever it did before
    for event in release.values():
        event.set()
    await asyncio.gather(*tasks)
    assert [server.in_flight for server in pool.servers] == [0, 0, 0]
    assert pool.counts()["requests/http://s1"] == 4


async def test_a_dead_server_is_drained_and_its_requests_move():
    pool, _ = pool_of(2)

    async def call(server):
        if server.url == "http://s0":
            raise EngineDeadError("gone")
        return server.url

    assert await asyncio.gather(*(pool.send(call) for _ in range(4))) == ["http://s1"] * 4
    assert [server.drained for server in pool.servers] == ["gone", None]
    asked = pool.servers[0].requests
    assert await pool.send(call) == "http://s1"
    assert pool.servers[0].requests == asked  # it gets no further requests
    assert pool.counts()["moved"] == pool.servers[0].failures == asked


async def test_when_all_are_dead_the_error_names_them():
    pool, _ = pool_of(2)

    async def call(server):
        raise EngineDeadError(f"{server.url} is gone")

    with pytest.raises(EngineDeadError):
        await pool.send(call)
    with pytest.raises(EngineDeadError, match=r"http://s0: .*is gone; http://s1: .*is gone"):
        await pool.send(call)


async def test_an_invalid_request_does_not_drain_the_server():
    pool, _ = pool_of(2)

    async def call(server):
        raise InferenceError("400")

    with pytest.raises(InferenceError, match="400"):
        await pool.send(call)
    assert len(pool.live) == 2
    assert pool.moved == 0


async def test_a_cut_connection_does_not_drain_a_server_that_passes_the_probe():
    probed = []

    async def probe(server):
        probed.append(server.url)

    pool, _ = pool_of(2, probe)
    tries = []

    async def call(server):
        tries.append(server.url)
        if len(tries) == 1:
            raise ServerUnreachableError("cut")
        return server.url

    assert await pool.send(call) in ("http://s0", "http://s1")
    assert probed == ["http://s0"]
    assert len(pool.live) == 2


async def test_a_request_that_both_healthy_servers_cut_is_retried_once_on_each():
    async def probe(server):
        return None

    pool, _ = pool_of(2, probe)
    tries = []

    async def call(server):
        tries.append(server.url)
        raise ServerUnreachableError("cut")

    with pytest.raises(ServerUnreachableError, match="cut"):
        await pool.send(call)
    assert len(tries) == 3


async def test_without_a_probe_a_drained_server_stays_drained():
    pool, clock = pool_of(2)
    pool.drain(pool.servers[0], "its last push failed")
    clock.now = 100.0
    assert not await pool.probe(pool.servers[0])
    assert [server.url for server in pool.live] == ["http://s1"]


async def test_the_servers_that_a_push_lost_are_drained_and_no_others():
    pool, _ = pool_of(3)
    pool.drain_lost(["http://s2", "http://elsewhere"])
    assert [server.url for server in pool.live] == ["http://s0", "http://s1"]
    assert "push of weights" in pool.servers[2].drained


async def test_a_drained_server_is_probed_after_a_while_and_used_again():
    alive = False

    async def probe(server):
        if not alive:
            raise ServerUnreachableError("still down")

    async def call(server):
        if server.url == "http://s0" and not alive:
            raise EngineDeadError("gone")
        return server.url

    pool, clock = pool_of(2, probe)
    await pool.send(call)
    assert pool.servers[0].drained == "gone"
    alive = True
    clock.now = 29.0
    await pool.send(call)
    assert pool.servers[0].drained == "gone"  # too early for a probe
    clock.now = 31.0
    await pool.send(call)
    await asyncio.gather(*pool._probes.values())
    assert pool.servers[0].drained is None
    assert await pool.send(call) == "http://s0"


async def test_the_only_server_is_never_drained():
    pool, _ = pool_of(1)
    dead = True

    async def call(server):
        if dead:
            raise EngineDeadError("gone")
        return server.url

    with pytest.raises(EngineDeadError, match="gone"):
        await pool.send(call)
    dead = False
    assert await pool.send(call) == "http://s0"


def test_a_pool_needs_distinct_servers():
    with pytest.raises(ConfigError, match="at least one server"):
        ServerPool([])
    with pytest.raises(ConfigError, match="named twice"):
        ServerPool([Server("http://a"), Server("http://a")])


# -- over HTTP


def run(count, scenario, **settings):
    async def whole(servers):
        client = VLLMChatClient(
            urls=[server.url for server in servers], tokenizer=tiny_tokenizer(), **{"backoff_s": 0.0, **settings}
        )
        async with client:
            return await scenario(client, servers)

    with ExitStack() as stack:
        return asyncio.run(whole([stack.enter_context(StubVLLM()) for _ in range(count)]))


def sample(client, seed=1):
    return client.complete_tokens([5, 6], sampling=SamplingParams(max_tokens=6), seed=seed)


def test_requests_in_flight_move_when_their_server_dies():
    async def scenario(client, servers):
        expected = [servers[0].sample([5, 6], max_tokens=6, seed=seed)[0] for seed in range(12)]
        servers[0].dead = True
        traces = await asyncio.gather(*(sample(client, seed) for seed in range(12)))
        assert [trace.completion_token_ids for trace in traces] == expected
        return client.metrics(), [server.url for server in servers]

    metrics, urls = run(3, scenario)
    assert metrics["live"] == 2
    assert metrics["moved"] == metrics[f"failures/{urls[0]}"] >= 1
    assert metrics[f"failures/{urls[1]}"] == 0


def test_a_server_that_stops_listening_is_drained_and_used_again_after_a_probe():
    async def scenario(client, servers):
        servers[1].close()
        for seed in range(4):
            await sample(client, seed)
        return client.metrics()["live"], await client.probe()

    live, alive = run(2, scenario)
    assert live == 1
    assert sorted(alive.values()) == [False, True]


def test_a_single_cut_connection_drains_no_server():
    async def scenario(client, servers):
        for server in servers:
            server.fail(GENERATE, CUT)
        await asyncio.gather(*(sample(client, seed) for seed in range(2)))
        return client.metrics()["live"], [len(server.bodies(COMPLETIONS)) for server in servers]

    live, probes = run(2, scenario)
    assert live == 2
    assert sum(probes) >= 1  # one token each, to see whether they are alive


def test_a_server_that_returns_with_old_weights_gets_no_requests():
    async def scenario(client, servers):
        for server in servers:
            server.weight_version = "3"
        await client.get_policy_version()
        servers[1].dead = True
        await asyncio.gather(*(sample(client, seed) for seed in range(4)))
        servers[1].dead, servers[1].weight_version = False, "default"  # restarted
        old = await client.probe()
        servers[1].weight_version = "4"  # it got a push again, and the next push is on its way to the other server
        return old, await client.probe(), [server.url for server in servers]

    old, new, urls = run(2, scenario)
    assert old == {urls[0]: True, urls[1]: False}
    assert new == {urls[0]: True, urls[1]: True}


def test_the_version_is_read_from_a_live_server():
    async def scenario(client, servers):
        servers[1].weight_version = "3"
        client._servers.pool.drain(client._servers.pool.servers[0], "gone")
        return await client.get_policy_version()

    assert run(2, scenario) == 3
