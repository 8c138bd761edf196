"""What the queue costs: `python -m benches.python.queue_cost`.

Groups of 8 rollouts with 1,024 tokens and their texts, 3 characters a token. Times are CPU times of
the process, the best of several rounds. `--fuzz N` reads N damaged entries instead and counts what
was accepted. `--redis URL` measures a log on a server instead of a SQLite file.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.queue.actor import run_actor
from ludic.training.queue.base import GroupLog, Work
from ludic.training.queue.entries import EntryError, Group, as_played, decode_group, encode_group
from ludic.training.queue.opening import open_log
from ludic.training.queue.source import BatchFromGroups, QueueBatchSource
from ludic.training.types import SAWBatch
from ludic.types import Rollout, Step, TokenTrace

MEMBERS, TOKENS, PROMPT = 8, 1024, 256
STEP_SAMPLES = 256
STEP_S = 1.0
ACTORS = 2
CHARACTERS_PER_TOKEN = 3


def make_group(number: int, run: str = "bench") -> Group:
    rng = random.Random(number)
    completion = TOKENS - PROMPT

    def text(tokens: int) -> str:
        return "".join(rng.choices("abcdefghij klmnop", k=CHARACTERS_PER_TOKEN * tokens))

    def rollout(member: int) -> Rollout:
        ids = [rng.randrange(150_000) for _ in range(TOKENS)]
        logps = [-rng.randrange(1 << 20) / (1 << 20) for _ in range(completion)]  # exact in float32
        trace = TokenTrace(ids[:PROMPT], ids[PROMPT:], logps, "stop")
        step = Step(0, text(PROMPT), text(completion), None, rng.random(), False, True, {"finish_reason": "stop"}, trace)
        return Rollout(f"{number}-{member}", [step], {"request_meta": {"group_id": f"g{number}", "problem": 12}})

    return Group(run, number, 0, played=as_played([rollout(member) for member in range(MEMBERS)]))


def best_ms(call: Callable[[], object], rounds: int = 15) -> float:
    times = []
    for _ in range(rounds):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return 1e3 * min(times)


def measure_parts(log: GroupLog, payload: bytes) -> dict[str, float]:
    """Milliseconds of each call for one group."""
    group = make_group(0)
    log.claim("bench", run="bench")
    log.offer("bench", [Work(number, 0) for number in range(40)])
    leases = [lease for _ in range(20) if (lease := log.lease("actor"))]
    parts = {
        "encode": best_ms(lambda: encode_group(group)),
        "lease": best_ms(lambda: log.lease("actor")),
        "deliver": best_ms(lambda: log.deliver(leases.pop(), payload)),
        "read": best_ms(lambda: log.read(None, limit=1)),
        "decode": best_ms(lambda: decode_group(payload)),
    }
    log.close("bench")
    return parts


async def measure_batches(log: GroupLog, run: str, groups: int, batches: int) -> list[tuple[float, float]]:
    """CPU seconds of all threads for each batch of delivered groups: beside a step of 1 s, and
    while the trainer waits for its batch."""
    to_batch = BatchFromGroups(rollouts_per_group=MEMBERS, credit_assigner=GroupNormalizedReturn(group_size=MEMBERS))
    source = QueueBatchSource(log, run=run, groups_per_batch=groups, to_batch=to_batch, ahead=1)
    originals = [make_group(number, run) for number in range(groups)]
    times = []
    first = asyncio.create_task(source.next_batch())
    while not log.outstanding():
        await asyncio.sleep(0.01)
    for _ in range(batches):
        while (lease := log.lease("actor")) is not None:
            original = originals[lease.work.number % groups]
            log.deliver(lease, encode_group(Group(run, lease.work.number, lease.work.version, played=original.played)))
        await first
        started = time.process_time()
        await asyncio.sleep(STEP_S)  # the trainer computes, and the source reads
        ended = time.process_time()
        await source.next_batch()  # offers the batch after next, and takes the next, which is there
        times.append((ended - started, time.process_time() - ended))
    await source.close_queue()
    return times


def measure(log: GroupLog) -> None:
    payload = encode_group(make_group(0))
    parts = measure_parts(log, payload)
    print(
        f"a group of {MEMBERS} x {TOKENS:,} tokens: {len(payload):,} bytes, {len(payload) / MEMBERS / TOKENS:.1f} a token with its texts"
    )
    print("ms: " + ", ".join(f"{name} {value:.2f}" for name, value in parts.items()))
    path = sum(parts[name] for name in ("encode", "deliver", "read", "decode"))
    print(f"encode, deliver, read and decode: {path:.2f} ms")
    groups = STEP_SAMPLES // MEMBERS
    beside_s, waited_s = map(min, zip(*asyncio.run(measure_batches(log, "collect", groups, 5)), strict=True))
    made = [make_group(number) for number in range(groups)]
    direct_ms = best_ms(lambda: asyncio.run(_make_directly(made)), 5)
    own_ms = 1e3 * waited_s - direct_ms
    rate = groups / (beside_s + waited_s)
    print(f"through one trainer: {rate:.0f} groups per CPU second, credit and samples included")
    print(f"a batch of {STEP_SAMPLES} samples: {1e3 * beside_s:.1f} ms of CPU beside the step, {1e3 * waited_s:.1f} ms after it")
    print(
        f"without a queue: {direct_ms:.1f} ms; the step is {own_ms:.1f} ms longer, {own_ms / 10 / STEP_S:.1f} % of {STEP_S:g} s, "
        f"{(own_ms + 1e3 * beside_s) / 10 / STEP_S:.1f} % if nothing is read beside it"
    )
    before_s, after_s = measure_with_actors(log, groups, 12)
    print(
        f"with no batch ahead, of real time: {1e3 * before_s:.1f} ms until an actor plays, {1e3 * after_s:.1f} ms after the last "
        f"group; without a queue {direct_ms:.1f} ms"
    )


async def measure_waits(log: GroupLog, run: str, groups: int, batches: int) -> list[tuple[float, float]]:
    """With no batch ahead, seconds of each batch from the request until an actor plays the first
    group, and from the end of the last group until the batch is there. Actors in processes of their
    own play for a second altogether."""
    came: list[Group] = []
    to_batch = BatchFromGroups(rollouts_per_group=MEMBERS, credit_assigner=GroupNormalizedReturn(group_size=MEMBERS))

    async def note_and_make(entries: Sequence[Group]) -> SAWBatch:
        came[:] = entries
        return await to_batch(entries)

    source = QueueBatchSource(log, run=run, groups_per_batch=groups, to_batch=note_and_make)
    times = []
    for number in range(batches):
        asked_s = time.time()
        await source.next_batch()
        ended_s = max(group.ended_s for group in came)
        began_s = min(group.ended_s - group.generation_s for group in came)
        times.append((began_s - asked_s, time.time() - ended_s))
        await asyncio.sleep(STEP_S)  # the trainer computes
        await source.announce(number + 1)
    await source.close_queue()
    return times[1:]  # the actors were started during the first


def _play_groups(log: GroupLog, name: str, groups: int) -> None:
    played = [make_group(number).played for number in range(groups)]

    async def play(work: Work) -> Sequence[Rollout]:
        await asyncio.sleep(STEP_S * ACTORS / groups)
        return played[work.number % groups]

    async def load(version: int) -> None:
        """The weights are no matter."""

    asyncio.run(run_actor(log, play=play, weights=load, actor=name))


def measure_with_actors(log: GroupLog, groups: int, batches: int) -> tuple[float, float]:
    """Medians of `measure_waits`."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_play_groups, args=(log, f"actor{number}", groups)) for number in range(ACTORS)]
    log.disconnect()
    log.claim("bench", run="waits")  # opens it: actors end where it is closed
    log.disconnect()
    for process in processes:
        process.start()
    times = asyncio.run(measure_waits(log, "waits", groups, batches))
    for process in processes:
        process.join(60)
    before_s, after_s = map(statistics.median, zip(*times, strict=True))
    return before_s, after_s


async def _make_directly(groups: list[Group]) -> None:
    to_batch = BatchFromGroups(rollouts_per_group=MEMBERS, credit_assigner=GroupNormalizedReturn(group_size=MEMBERS))
    await to_batch(groups)


def fuzz(count: int, seed: int = 0) -> None:
    """Read damaged entries: bits flipped, bytes overwritten, cut out, repeated or appended."""
    rng, payload = random.Random(seed), encode_group(make_group(0))
    accepted, slowest_s = 0, 0.0
    for _ in range(count):
        damaged = bytearray(payload)
        for _ in range(rng.randint(1, 4)):
            at, length = rng.randrange(len(damaged)), rng.randint(1, 40)
            change = rng.randrange(5)
            if change == 0:
                damaged[at] ^= 1 << rng.randrange(8)
            elif change == 1:
                damaged[at : at + 4] = rng.randbytes(4)
            elif change == 2:
                del damaged[at : at + length]
            elif change == 3:
                damaged[at:at] = damaged[at : at + length]
            else:
                damaged += rng.randbytes(length)
        if bytes(damaged) == payload:
            continue
        started = time.process_time()
        try:
            decode_group(bytes(damaged))
            accepted += 1
        except EntryError:
            pass
        slowest_s = max(slowest_s, time.process_time() - started)
    print(f"{count:,} damaged entries: {accepted} accepted, the slowest took {1e3 * slowest_s:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.queue_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--fuzz", type=int, default=0, help="read this many damaged entries instead")
    parser.add_argument("--redis", help="address of a Redis server, whose log `ludic-bench` is overwritten")
    options = parser.parse_args()
    if options.fuzz:
        fuzz(options.fuzz)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(open_log(options.redis or Path(folder), name="ludic-bench"))


if __name__ == "__main__":
    main()
