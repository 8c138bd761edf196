"""Holds calls back from servers whose KV cache is nearly full, by what they report at `/metrics`. A
server that runs out of room preempts requests, and computes their tokens again later."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ludic.errors import InferenceError, ServerError
from ludic.inference.servers.errors import is_retryable
from ludic.inference.servers.http import request_once

READ_EVERY_S, READ_TIMEOUT_S = 0.5, 2.0
RETRY_S = 30.0
"""When a server without metrics is asked for them again."""
MAX_BYTES = 16 * 2**20
"""Limit on the metrics. A server with hundreds of series has 1 MB."""
MOST_TOKENS = 2.0**32
"""A KV cache that is said to have room for more is taken to be of an unknown size."""

Metrics = Mapping[str, list[tuple[str, float]]]
"""Name -> (labels, value) of each series."""
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+([^\s{}]+)(?:[ \t]+-?\d+)?[ \t]*")
_SIZE = re.compile(r'(?:^|,)(block_size|num_gpu_blocks)="(\d+)"')


def parse_metrics(text: str) -> Metrics:
    """Read Prometheus' text format. Comments, and lines of another form, are left out."""
    series = defaultdict(list)
    for match in filter(None, map(_LINE.fullmatch, text.splitlines())):
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            series[match[1]].append((match[2] or "", value))
    return series


async def read_metrics(headers: Mapping[str, str], url: str) -> Metrics | None:
    """The metrics of a server, empty if it has none. None if it does not answer in time."""
    try:
        answer = await request_once("GET", f"{url}/metrics", headers=headers, timeout_s=READ_TIMEOUT_S, max_bytes=MAX_BYTES)
        return parse_metrics(answer.raise_for_status().text)
    except InferenceError as error:
        return {} if isinstance(error, ServerError) and not is_retryable(error) else None


def sum_series(metrics: Metrics, *names: str) -> float:
    """The sum of the series with these names; 0 if there is none."""
    return sum(value for name in names for _, value in metrics.get(name, ()))


@dataclass
class KVLimit:
    """The calls that a server may have in flight, which follow the use of its KV cache.

    1. There is no limit until more than `most` of the cache is in use, or the server has preempted
       a request since the last reading. Of several engines the fullest counts.
    2. It is then 0.9 times, or 0.75 times after preemptions, the calls that run there, and at least
       1. Calls that wait in the server's own queue do not count.
    3. While less is in use and none waits, each answer raises it by 1/8.

    Metrics are read twice a second while calls are sent. A server without them has no limit. One
    that does not answer in time, since it has much to do, keeps the limit that it has.
    """

    most: float | None = None
    """None: there is no limit, and metrics are not read."""
    calls: float = math.inf
    tokens: int | None = None
    """For which the cache has room; None if the server has not reported it."""
    reading: asyncio.Task[None] | None = None
    _grows: bool = False
    _preemptions: float = math.inf
    _read_at: float = -math.inf

    def is_due(self) -> bool:
        """Whether it is time to read the metrics; then they are taken to be read now."""
        is_read = self.most is not None and (self.reading is None or self.reading.done())
        is_due = is_read and time.monotonic() - self._read_at >= READ_EVERY_S
        self._read_at = time.monotonic() if is_due else self._read_at
        return is_due

    def record_answer(self) -> None:
        self.calls += self._grows / 8

    def record_metrics(self, metrics: Metrics | None, in_flight: int) -> None:
        """The server, with so many calls of ours, has reported this; None: it gave no answer."""
        if metrics is None:
            return
        use = [value for name in ("vllm:kv_cache_usage_perc", "sglang:token_usage") for _, value in metrics.get(name, ())]
        if self.most is None or not use:
            self.calls, self._grows, self._read_at = math.inf, False, time.monotonic() + RETRY_S
            return
        running = sum_series(metrics, "vllm:num_requests_running", "sglang:num_running_reqs")
        waiting = sum_series(metrics, "vllm:num_requests_waiting", "sglang:num_queue_reqs")
        preemptions = sum_series(metrics, "vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
        sizes = [dict(_SIZE.findall(labels)) for labels, _ in metrics.get("vllm:cache_config_info", ())]
        tokens = sum(float(size.get("num_gpu_blocks", 0)) * float(size.get("block_size", 0)) for size in sizes)
        tokens = tokens or sum_series(metrics, "sglang:max_total_num_tokens")
        self.tokens = int(tokens) if 1 <= tokens <= MOST_TOKENS else None
        preempted, self._preemptions = preemptions > self._preemptions, preemptions
        self._grows = not preempted and max(use) <= self.most and not waiting
        if preempted or max(use) > self.most:
            share = (0.75 if preempted else 0.9) * running / max(1.0, running + waiting)
            self.calls = max(1.0, min(self.calls, share * in_flight))
