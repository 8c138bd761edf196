"""A hanging server loses its requests while others answer; a slow one keeps them."""

import asyncio
from contextlib import ExitStack

import pytest
from faulty_server import CUT, HANG
from stub_vllm import StubVLLM
from stub_vllm_sampling import COMPLETIONS, GENERATE
from tiny_policy import tiny_tokenizer

from ludic.errors import ConfigError, InferenceError
from ludic.inference import SamplingParams, VLLMChatClient
from ludic.inference.servers import server as server_module
from ludic.inference.servers.pool import ServerPool
from ludic.inference.servers.server import Server
from ludic.inference.vllm import servers as servers_module


class Hanging:
    """Servers of which the first holds its calls until released. Records calls and probes."""

    def __init__(self, *, lives, progress=None, count=2, silence_s=0.02):
        self.released, self.probed, self.given = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.taken, self.broken_off = [], []
        self.lives, self.steps = lives, iter(progress or ())
        servers = [Server(f"http://s{i}") for i in range(count)]
        told = None if progress is None else self.progress
        self.pool = ServerPool(servers, probe=self.probe, progress=told, silence_s=silence_s)

    async def probe(self, server):
        assert server.url == "http://s0"
        self.probed.set()
        if not self.lives:
            raise TimeoutError

    async def progress(self, server):
        return next(self.steps)

    async def call(self, server):
        self.taken.append(server.url)
        try:
            await (self.released if server.url == "http://s0" else self.given).wait()
        except asyncio.CancelledError:
            self.broken_off.append(server.url)
            raise
        return server.url

    async def send(self, count):
        """The first server holds half of the calls; the other one has answered its half."""
        tasks = [asyncio.create_task(self.pool.send(self.call)) for _ in range(count)]
        while len(self.taken) < count:
            await asyncio.sleep(0)
        self.given.set()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks


@pytest.mark.parametrize("progress", [None, [7.0, 7.0], [None, None]])
async def test_calls_of_a_hanging_server_move_to_the_others(progress):
    hanging = Hanging(lives=False, progress=progress)
    tasks = await hanging.send(6)
    assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == ["http://s1"] * 6
    assert hanging.broken_off == ["http://s0"] * 3
    slow, other = hanging.pool.servers
    assert "answered nothing while others did" in slow.drained
    assert (hanging.pool.moved, slow.failures, other.failures) == (3, 3, 0)
    assert (slow.in_flight, other.in_flight) == (0, 0)


async def released_after_two_probes(hanging, count=4):
    tasks = await hanging.send(count)
    for _ in range(2):
        await asyncio.wait_for(hanging.probed.wait(), 60)
        hanging.probed.clear()
    hanging.released.set()
    return await asyncio.wait_for(asyncio.gather(*tasks), 60)


async def test_a_server_that_answers_the_probe_counts_as_slow():
    hanging = Hanging(lives=True)
    assert sorted(await released_after_two_probes(hanging)) == ["http://s0"] * 2 + ["http://s1"] * 2
    assert (hanging.pool.moved, hanging.broken_off, len(hanging.pool.live)) == (0, [], 2)


async def test_a_server_that_makes_progress_keeps_its_calls_though_the_probe_waits():
    hanging = Hanging(lives=False, progress=map(float, range(1000)))
    assert sorted(await released_after_two_probes(hanging)) == ["http://s0"] * 2 + ["http://s1"] * 2
    assert (hanging.pool.moved, hanging.broken_off, len(hanging.pool.live)) == (0, [], 2)


async def was_suspected(hanging):
    """Whether a server was suspected within five times the allowed silence."""
    silence, looks = hanging.pool._hang_detector, []
    is_silent, seen = silence._is_silent, asyncio.Event()

    def counting(*given):
        looks.append(is_silent(*given))
        if len(looks) == 40:  # of two servers: four within that time
            seen.set()
        return looks[-1]

    silence._is_silent = counting
    await asyncio.wait_for(seen.wait(), 60)
    return any(looks)


async def test_if_no_server_answers_none_is_suspected():
    """As during a weight push, when all servers are paused."""
    hanging = Hanging(lives=False)
    held = [asyncio.create_task(hanging.pool.send(hanging.call)) for _ in range(2)]
    assert not await was_suspected(hanging)
    hanging.released.set()
    hanging.given.set()
    assert await asyncio.gather(*held) == ["http://s0", "http://s1"]


async def test_the_last_live_server_is_waited_for():
    hanging = Hanging(lives=False)
    hanging.pool.drain(hanging.pool.servers[1], "gone")
    held = asyncio.create_task(hanging.pool.send(hanging.call))
    assert not await was_suspected(hanging)
    hanging.released.set()
    assert await held == "http://s0"


@pytest.mark.parametrize("settings", [{"count": 1}, {"silence_s": None}])
async def test_a_single_server_is_not_watched_and_watching_can_be_disabled(settings):
    hanging = Hanging(lives=False, **settings)
    hanging.released.set()
    held = asyncio.create_task(hanging.pool.send(hanging.call))
    assert await held == "http://s0"
    assert hanging.pool._hang_detector is None or not hanging.pool._hang_detector._tasks


async def test_a_hanging_server_loses_its_calls_even_if_the_others_are_idle():
    """For example at the end of a batch, when no other server has anything left to answer."""
    hanging = Hanging(lives=False)
    hanging.given.set()
    assert await asyncio.wait_for(hanging.pool.send(hanging.call), 60) == "http://s1"
    assert hanging.taken == ["http://s0", "http://s1"]


async def test_an_error_counts_as_an_answer():
    hanging = Hanging(lives=False)
    held = [asyncio.create_task(hanging.pool.send(hanging.call)) for _ in range(2)]
    while len(hanging.taken) < 2:
        await asyncio.sleep(0)
    with pytest.raises(InferenceError, match="400"):
        async with hanging.pool._hang_detector.watch(hanging.pool.servers[1]):
            raise InferenceError("400")
    await asyncio.wait_for(hanging.probed.wait(), 60)
    hanging.given.set()
    assert await asyncio.wait_for(asyncio.gather(*held), 60) == ["http://s1"] * 2


async def test_calls_in_flight_move_when_their_server_is_drained():
    """For example a server that missed a weight push and stays paused."""
    hanging = Hanging(lives=True, silence_s=0.2)
    tasks = [asyncio.create_task(hanging.pool.send(hanging.call)) for _ in range(4)]
    while len(hanging.taken) < 4:
        await asyncio.sleep(0)
    hanging.given.set()
    hanging.pool.drain(hanging.pool.servers[0], "its last push failed")
    assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == ["http://s1"] * 4
    assert not hanging.probed.is_set()


async def test_a_moved_call_is_cancelled_immediately():
    hanging = Hanging(lives=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hanging.pool.send(hanging.call), 0.01)
    assert hanging.broken_off == ["http://s0"]
    assert [server.in_flight for server in hanging.pool.servers] == [0, 0]


def test_the_allowed_silence_must_be_positive():
    with pytest.raises(ConfigError, match="silence_s"):
        ServerPool([Server("http://a")], silence_s=0.0)


# -- over HTTP


def test_requests_of_a_hanging_server_get_the_same_answer_from_the_other(monkeypatch):
    monkeypatch.setattr(server_module, "PROBE_TIMEOUT_S", 0.3)

    async def scenario(servers):
        urls = [server.url for server in servers]
        client = VLLMChatClient(urls=urls, tokenizer=tiny_tokenizer(), backoff_s=0.0, timeout_s=60.0, silence_s=0.1)
        expected = [servers[0].sample([5, 6], max_tokens=6, seed=seed)[0] for seed in range(12)]
        servers[0].fail(GENERATE, *[HANG] * 12)
        servers[0].fail(COMPLETIONS, *[HANG] * 12)
        async with client:
            sampling = SamplingParams(max_tokens=6)
            traces = await asyncio.gather(*(client.complete_tokens([5, 6], sampling=sampling, seed=seed) for seed in range(12)))
            assert [trace.completion_token_ids for trace in traces] == expected
            return client.metrics(), urls

    with ExitStack() as stack:
        metrics, urls = asyncio.run(scenario([stack.enter_context(StubVLLM()) for _ in range(2)]))
    assert metrics["live"] == 1
    assert metrics["moved"] == metrics[f"failures/{urls[0]}"] == 6


METRICS = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 100.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 23.0
vllm:generation_tokens_total{engine="1",model_name="tiny"} 4.0
vllm:generation_tokens_created{engine="0",model_name="tiny"} 1.7e+09
"""


@pytest.mark.parametrize(
    ("answer", "expected"), [((200, METRICS), 127.0), ((200, ""), None), ((404, METRICS), None), (CUT, None), (HANG, None)]
)
def test_progress_is_the_servers_token_counter_and_is_read_once(monkeypatch, answer, expected):
    monkeypatch.setattr(servers_module, "VERSION_TIMEOUT_S", 30.0 if expected else 0.2)
    with StubVLLM() as server:
        server.fail("/metrics", answer)
        assert asyncio.run(servers_module.read_progress({}, server.url)) == expected
        assert len(server.bodies("/metrics")) <= 1


def test_a_stopped_server_has_no_progress():
    with StubVLLM() as server:
        url = server.url
    assert asyncio.run(servers_module.read_progress({}, url)) is None
