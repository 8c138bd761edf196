"""What a group costs on its way from an actor to the trainer, for the two kinds of queues.

    python -m benches.python.queue_speed

A group is 8 answers of 768 tokens to a prompt of 256, with log-probabilities and texts of four
bytes a token. Prints medians in ms, bytes a token, and how many groups a second one process
encodes, delivers, reads and decodes in turn. Both queues flush to disk as they do in a run.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benches.python.redis_server import RedisServer, find_redis_server

from ludic.training.queue.base import GroupLog, Work
from ludic.training.queue.entries import Group, as_played, decode_group, encode_group
from ludic.training.queue.redis import RedisLog
from ludic.training.queue.sqlite import SQLiteLog
from ludic.types import Rollout, Step, TokenTrace

MEMBERS, PROMPT, ANSWER, GROUPS = 8, 256, 768, 200
TOKENS = MEMBERS * (PROMPT + ANSWER)


def make_group(number: int) -> Group:
    rng = random.Random(number)
    prompt = [rng.randrange(150_000) for _ in range(PROMPT)]

    def rollout(member: int) -> Rollout:
        ids = [rng.randrange(150_000) for _ in range(ANSWER)]
        trace = TokenTrace(prompt, ids, [-rng.randrange(2**20) / 2**18 for _ in ids], "stop")
        text = "".join(rng.choices("abcdefgh ", k=4 * ANSWER))
        step = Step(0, "p" * 4 * PROMPT, text, None, 1.0, False, True, {"finish_reason": "stop"}, trace)
        return Rollout(f"{number}-{member}", [step], {"request_meta": {"group_id": str(number)}, "policy_version": 3})

    return Group("run", number, 3, 0, "actor", 1.0, 0.0, as_played([rollout(member) for member in range(MEMBERS)]))


def measure(log: GroupLog) -> dict[str, Any]:
    groups = [make_group(number) for number in range(20)]
    log.claim("trainer", run="run")
    log.offer("trainer", [Work(number, 3) for number in range(GROUPS)])
    times: dict[str, list[float]] = {name: [] for name in ("lease", "encode", "deliver", "read", "decode", "forget")}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        times[name].append(1e3 * (time.perf_counter() - started))
        return result

    position, size, started = None, 0, time.perf_counter()
    for number in range(GROUPS):
        lease = timed("lease", lambda: log.lease("actor"))
        payload = timed("encode", lambda number=number: encode_group(groups[number % len(groups)]))
        timed("deliver", lambda lease=lease, payload=payload: log.deliver(lease, payload))
        (entry,) = timed("read", lambda position=position: log.read(position))
        timed("decode", lambda entry=entry: decode_group(entry.payload))
        position, size = entry.position, len(entry.payload)
        if number % 20 == 19:
            timed("forget", lambda position=position: log.forget("trainer", position))
    seconds = time.perf_counter() - started
    medians = {f"{name}_ms": round(statistics.median(values), 3) for name, values in times.items()}
    return {**medians, "bytes_per_token": round(size / TOKENS, 2), "groups_per_s": round(GROUPS / seconds)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"queue": "sqlite", **measure(SQLiteLog(Path(folder) / "queue.sqlite"))}), flush=True)
        program = find_redis_server()
        if program is None:
            print("no redis-server: `make redis` fetches one")
            return
        with RedisServer(Path(folder) / "redis", program) as server:
            print(json.dumps({"queue": "redis", **measure(RedisLog(server.url, "bench"))}), flush=True)


if __name__ == "__main__":
    main()
