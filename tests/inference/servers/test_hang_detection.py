"""A server that hangs while others answer is left, and one that only takes long is not."""

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
from ludic.inference.vllm import server_queries


class Hanging:
    """Servers of which the first holds its calls until it is released, and what is asked of
    them."""

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
        """Half of the calls are held by the first server, and the other has answered its half."""
        tasks = [asyncio.create_task(self.pool.send(self.call)) for _ in range(count)]
        while len(self.taken) < count:
            await asyncio.sleep(0)
        self.given.set()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks


@pytest.mark.parametrize("progress", [None, [7.0, 7.0], [None, None]])
async def test_the_calls_of_a_server_that_hangs_move_to_the_others(progress):
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


async def test_one_that_answers_the_probe_only_takes_long():
    hanging = Hanging(lives=True)
    assert sorted(await released_after_two_probes(hanging)) == ["http://s0"] * 2 + ["http://s1"] * 2
    assert (hanging.pool.moved, hanging.broken_off, len(hanging.pool.live)) == (0, [], 2)


async def test_one_that_works_on_what_it_has_is_not_left_though_a_probe_waits_behind():
    hanging = Hanging(lives=False, progress=map(float, range(1000)))
    assert sorted(await released_after_two_probes(hanging)) == ["http://s0"] * 2 + ["http://s1"] * 2
    assert (hanging.pool.moved, hanging.broken_off, len(hanging.pool.live)) == (0, [], 2)


async def looked_at(hanging):
    """Whether a server was suspected within five times the time that it may be silent."""
    silence, looks = hanging.pool._hang_detector, []
    is_silent, seen = silence._is_silent, asyncio.Event()

    def counting(*given):
        looks.append(is_silent(*given))
        if len(looks) == 40:  # of two servers, four within that time
            seen.set()
        return looks[-1]

    silence._is_silent = counting
    await asyncio.wait_for(seen.wait(), 60)
    return any(looks)


async def test_where_no_other_answers_either_nobody_is_suspected():
    """As while weights are pushed: all are paused."""
    hanging = Hanging(lives=False)
    held = [asyncio.create_task(hanging.pool.send(hanging.call)) for _ in range(2)]
    assert not await looked_at(hanging)
    hanging.released.set()
    hanging.given.set()
    assert await asyncio.gather(*held) == ["http://s0", "http://s1"]


async def test_the_last_one_that_lives_is_waited_for():
    hanging = Hanging(lives=False)
    hanging.pool.drain(hanging.pool.servers[1], "gone")
    held = asyncio.create_task(hanging.pool.send(hanging.call))
    assert not await looked_at(hanging)
    hanging.released.set()
    assert await held == "http://s0"


@pytest.mark.parametrize("settings", [{"count": 1}, {"silence_s": None}])
async def test_an_only_server_is_not_watched_nor_is_any_where_that_is_set(settings):
    hanging = Hanging(lives=False, **settings)
    hanging.released.set()
    held = asyncio.create_task(hanging.pool.send(hanging.call))
    assert await held == "http://s0"
    assert hanging.pool._hang_detector is None or not hanging.pool._hang_detector._tasks


async def test_where_the_others_have_nothing_to_do_one_that_hangs_is_left_too():
    """At the end of a batch, say: nobody else has anything left to answer."""
    hanging = Hanging(lives=False)
    hanging.given.set()
    assert await asyncio.wait_for(hanging.pool.send(hanging.call), 60) == "http://s1"
    assert hanging.taken == ["http://s0", "http://s1"]


async def test_an_error_is_an_answer_too():
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


async def test_calls_in_flight_at_a_server_that_is_drained_for_another_reason_move():
    """It lost a push of weights, say, and stays paused."""
    hanging = Hanging(lives=True, silence_s=0.2)
    tasks = [asyncio.create_task(hanging.pool.send(hanging.call)) for _ in range(4)]
    while len(hanging.taken) < 4:
        await asyncio.sleep(0)
    hanging.given.set()
    hanging.pool.drain(hanging.pool.servers[0], "its last push failed")
    assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == ["http://s1"] * 4
    assert not hanging.probed.is_set()


async def test_a_call_that_is_given_up_is_broken_off_at_once():
    hanging = Hanging(lives=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hanging.pool.send(hanging.call), 0.01)
    assert hanging.broken_off == ["http://s0"]
    assert [server.in_flight for server in hanging.pool.servers] == [0, 0]


def test_silence_must_last_some_time():
    with pytest.raises(ConfigError, match="silence_s"):
        ServerPool([Server("http://a")], silence_s=0.0)


# -- over HTTP


def test_requests_of_a_server_that_hangs_are_answered_by_the_other_as_it_would_have(monkeypatch):
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
def test_progress_is_what_a_server_counts_of_its_tokens_and_is_asked_once(monkeypatch, answer, expected):
    monkeypatch.setattr(server_queries, "VERSION_TIMEOUT_S", 30.0 if expected else 0.2)
    with StubVLLM() as server:
        server.fail("/metrics", answer)
        assert asyncio.run(server_queries.read_progress({}, server.url)) == expected
        assert len(server.bodies("/metrics")) <= 1


def test_progress_is_not_known_of_a_server_that_is_gone():
    with StubVLLM() as server:
        url = server.url
    assert asyncio.run(server_queries.read_progress({}, url)) is None
