"""Calls that are held back while a server's KV cache is nearly full."""

import asyncio
import math
import random

import pytest
from faulty_server import CUT, HANG
from hypothesis import given, strategies as st
from stub_vllm import StubVLLM
from tiny_policy import tiny_tokenizer

from ludic.errors import ConfigError
from ludic.inference import SamplingParams, VLLMChatClient
from ludic.inference.servers import admission
from ludic.inference.servers.admission import MOST_TOKENS, KVLimit, parse_metrics, read_metrics, sum_series
from ludic.inference.servers.pool import ServerPool
from ludic.inference.servers.routing import ByPrefix
from ludic.inference.servers.server import Server

VLLM = """# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a b,}\\" c"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a b,}\\" c"} 7.5e-1 1395066363000
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_preemptions_total{engine="0"} 5.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
vllm:cache_config_info{block_size="128",cache_dtype="auto",num_gpu_blocks="64",num_gpu_blocks_override="None"} 1.0
"""


def limit_after(*reports, calls=10):
    limit = KVLimit(0.9)
    for each in reports:
        limit.record_metrics(each, calls)
    return limit


def report(use, running=10, waiting=0, preemptions=0):
    named = {"kv_cache_usage_perc": use, "num_requests_running": running, "num_requests_waiting": waiting}
    return parse_metrics("".join(f"vllm:{k} {v}\n" for k, v in {**named, "num_preemptions_total": preemptions}.items()))


def test_the_metrics_of_a_vllm_server_are_read():
    metrics = parse_metrics(VLLM)
    assert [value for _, value in metrics["vllm:kv_cache_usage_perc"]] == [0.25, 0.75]
    assert sum_series(metrics, "vllm:num_requests_running") == 7
    limit = limit_after(metrics)
    assert (limit.tokens, limit._preemptions) == (64 * 128, 5)


def test_the_metrics_of_an_sglang_server_are_read():
    names = ["token_usage", "num_running_reqs", "num_queue_reqs", "num_retracted_requests_total", "max_total_num_tokens"]
    text = "".join(f'sglang:{name}{{tp_rank="0"}} {value}\n' for name, value in zip(names, [0.95, 3, 1, 7, 4096], strict=True))
    limit = limit_after(parse_metrics(text), calls=8)
    assert (limit.calls, limit.tokens, limit._preemptions) == (0.9 * 8 * 3 / (3 + 1), 4096, 7)


@pytest.mark.parametrize(
    "text", ["", "<html>404</html>", "vllm:kv_cache_usage_perc NaN", "vllm:kv_cache_usage_perc{", "a 1\nb{} x"]
)
def test_without_the_use_of_the_cache_there_is_no_limit(text):
    assert limit_after(report(0.99), parse_metrics(text)).calls == math.inf


@given(st.text(alphabet='ab:{}=" \n\\#01.e+NaInf\t') | st.text())
def test_no_text_is_an_error(text):
    assert all(math.isfinite(value) for series in parse_metrics(text).values() for _, value in series)


NAMES = ["kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "num_preemptions_total"]
NAMES = [*(f"vllm:{name}" for name in NAMES), "sglang:max_total_num_tokens"]
NUMBERS = st.floats(allow_nan=False).map(str) | st.sampled_from(["9" * 5000, "-7", "1e308", "-1e308", "0"])


@given(st.lists(st.lists(st.tuples(st.sampled_from(NAMES), NUMBERS), max_size=9), max_size=4), NUMBERS, NUMBERS)
def test_no_number_is_an_error(reports, blocks, size):
    """Each is of a server that says what it likes."""
    server, info = Server("http://a"), f'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{blocks}"}} 1.0\n'
    server.kv.most = 0.9
    for lines in reports:
        server.kv.record_metrics(parse_metrics(info + "".join(f"{name} {value}\n" for name, value in lines)), 10)
        assert server.kv.calls >= 1
        assert server.kv.tokens is None or 1 <= server.kv.tokens <= MOST_TOKENS
        ByPrefix().record(server, [b"1", b"2"])


def test_a_server_that_does_not_answer_keeps_its_limit():
    assert limit_after(report(0.95), None).calls == 9


@pytest.mark.parametrize(("fault", "expected"), [(HANG, None), (CUT, None), ((503, ""), None), ((404, ""), {})])
def test_only_a_server_that_says_so_has_no_metrics(fault, expected, monkeypatch):
    monkeypatch.setattr(admission, "READ_TIMEOUT_S", 0.2)
    with StubVLLM() as server:
        server.metrics = metrics(use=0.1)
        server.fail("/metrics", fault)
        assert asyncio.run(read_metrics({}, server.url)) == expected
        assert asyncio.run(read_metrics({}, server.url))["vllm:kv_cache_usage_perc"]


def test_a_closed_pool_reads_no_metrics():
    async def scenario(server):
        pool = ServerPool([Server(server.url)], max_kv_use=0.9)
        pool.servers[0].has_room()
        await asyncio.sleep(0)
        await pool.aclose()
        await asyncio.wait([pool.servers[0].kv.reading], timeout=5)
        return pool.servers[0].kv.reading.cancelled()

    with StubVLLM() as server:
        server.fail("/metrics", HANG)
        assert asyncio.run(scenario(server))


def test_there_is_no_limit_until_the_cache_is_nearly_full():
    assert limit_after(report(0.9), report(0.5, waiting=30)).calls == math.inf


def test_the_limit_is_less_than_what_runs_in_a_full_cache():
    assert limit_after(report(0.95)).calls == 9
    assert limit_after(report(0.95, running=5, waiting=5)).calls == 4.5  # 0.9 * 10 * 5 / (5 + 5)
    assert limit_after(report(0.5), report(0.5, preemptions=1)).calls == 7.5
    assert limit_after(report(0.99, running=1), calls=1).calls == 1


def test_a_server_that_was_restarted_has_not_preempted():
    assert limit_after(report(0.5, preemptions=8), report(0.5, preemptions=0)).calls == math.inf


def test_answers_raise_the_limit_while_there_is_room():
    limit = limit_after(report(0.95))
    for then, expected in [(report(0.95), 9), (report(0.5), 10), (report(0.5, waiting=1), 10)]:
        limit.record_metrics(then, 10)
        for _ in range(8):
            limit.record_answer()
        assert limit.calls == expected


@pytest.mark.parametrize("most", [0, 1.5, math.nan])
def test_a_share_is_in_bounds(most):
    with pytest.raises(ConfigError, match=r"max_kv_use .*None sets no limit"):
        ServerPool([Server("http://a")], max_kv_use=most)


class Scheduler:
    """A server's engine: each running request gets one token a tick. The latest one that does not
    fit any more is preempted, and its prompt and tokens are computed again later, 500 a tick."""

    def __init__(self, blocks):
        self.blocks, self.queue, self.running, self.preemptions, self.ticks = blocks, [], [], 0, 0.0

    def used(self):
        return sum(-(-now // 16) for now, _ in self.running)

    def tick(self):
        """Returns how many requests have ended."""
        prefilled = 0
        while self.queue and self.used() + -(-self.queue[0][0] // 16) <= self.blocks:
            self.running.append(self.queue.pop(0))
            prefilled += self.running[-1][0]
        self.running = [(now + 1, end) for now, end in self.running]
        while self.used() > self.blocks:
            self.queue.insert(0, self.running.pop())
            self.preemptions += 1
        before, self.running = len(self.running), [(now, end) for now, end in self.running if now < end]
        self.ticks += 1 + prefilled / 500
        return before - len(self.running)

    def report(self):
        return report(self.used() / self.blocks, len(self.running), len(self.queue), self.preemptions)


def serve(limit, seed, requests=1500, concurrency=200):
    """(preemptions of the first 1000 ticks, of the others, ticks), with at most `concurrency`
    requests at a time. Those that are held back wait in the client."""
    draw, engine, in_flight = random.Random(seed), Scheduler(blocks=1000), 0
    prompts = [draw.randrange(20, 200) for _ in range(requests)]
    todo = [(prompt, prompt + min(1500, 1 + int(draw.expovariate(1 / 300)))) for prompt in prompts]
    first, number = 0, 0
    while todo or in_flight:
        while todo and in_flight < min(concurrency, limit.calls):
            engine.queue.append(todo.pop())
            in_flight += 1
        for _ in range(engine.tick()):
            in_flight -= 1
            limit.record_answer()
        number += 1
        if number % 25 == 0:
            limit.record_metrics(engine.report(), in_flight)
        if number == 1000:
            first = engine.preemptions
    return first, engine.preemptions - first, engine.ticks


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_preemptions_are_rare_after_the_first_requests(seed):
    """Those are sent before the cache is full. The limit costs some of the cache: requests grow,
    and their lengths are unknown."""
    _, without, ticks = serve(KVLimit(None), seed)
    _, held, held_ticks = serve(KVLimit(0.9), seed)
    assert without > 1000
    assert held <= 0.03 * without
    assert held_ticks <= 1.25 * ticks


# -- over HTTP


def test_requests_wait_until_the_server_has_room_again():
    async def scenario(server):
        client = VLLMChatClient(port=server.port, host="127.0.0.1", tokenizer=tiny_tokenizer())
        async with client, asyncio.timeout(20):

            async def ask(seed):
                await client.complete_tokens([5, 6], sampling=SamplingParams(max_tokens=2), seed=seed)

            await ask(0)  # which has the metrics read
            while client._servers.pool.servers[0].kv.tokens is None:
                await asyncio.sleep(0.01)
            server.metrics = metrics(use=0.95)
            await asyncio.sleep(0.5)
            server._running.clear()
            asked = [asyncio.create_task(ask(seed)) for seed in range(4)]
            while client.metrics()["held"] == 0:
                await asyncio.sleep(0.01)
                asked += [asyncio.create_task(ask(9))]
            held, at_server = client.metrics()["held"], client._servers.pool.servers[0].in_flight
            server._running.set()
            server.metrics = metrics(use=0.1)
            await asyncio.gather(*asked)
            return held, at_server, len(asked)

    with StubVLLM() as server:
        server.metrics = metrics(use=0.1)
        held, at_server, asked = asyncio.run(scenario(server))
    assert held >= 1
    assert at_server < asked


def test_without_metrics_nothing_waits():
    async def scenario(server):
        async with VLLMChatClient(port=server.port, host="127.0.0.1", tokenizer=tiny_tokenizer()) as client:
            for seed in range(4):
                await client.complete_tokens([5, 6], sampling=SamplingParams(max_tokens=2), seed=seed)
            return client.metrics()["held"]

    with StubVLLM() as server:
        assert asyncio.run(scenario(server)) == 0
        assert sum(path == "/metrics" for path, _, _ in server.requests) == 1


def metrics(use):
    """Of a server on which all requests run."""
    return (
        f'vllm:kv_cache_usage_perc{{engine="0"}} {use}\nvllm:num_requests_running{{engine="0"}} 4.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
    )
