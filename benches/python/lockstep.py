"""Shared batches on several ranks: how well the plan of all ranks keeps them in step, what plans
cost, and the bookkeeping of a step. Fixed seeds; 32 samples a rank, as after sampling.

Nothing is compared with a reference here, so there is no contest: `report` measures.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benches.python.contest import Contest
from benches.python.samples import list_items, with_arrays
from numpy.typing import NDArray

from ludic.training import SharedBatches
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import plan_lines
from ludic.training.batching.rank_plans import LINEAR, QUADRATIC, SAME_BATCH, RankPlans, RankShare, all_have_samples, plan_atoms
from ludic.training.batching.sample_codec import decode_batch, encode_batch
from ludic.training.batching.source import BatchSourceBase
from ludic.training.config import TrainerConfig
from ludic.training.types import SAWBatch, SAWItem

BUDGET, SAMPLES_A_RANK, LONGEST = 16384, 32, 8192
PACKINGS = ("optimal", "padding_free")
ROUNDS = 5


def contests() -> Iterator[Contest]:
    yield from ()


def report() -> str:
    return "\n".join([*_report_lockstep(), "", *_report_imbalance(), "", *_report_plans(), "", *_report_bookkeeping()])


def _config(packing: str) -> TrainerConfig:
    return TrainerConfig(model_device="cpu", max_seq_len=LONGEST, micro_token_budget=BUDGET, packing=packing)


def _lognormal(median: int, sigma: float, longest: int) -> Callable[[int, int], NDArray[np.int32]]:
    def draw(samples: int, seed: int) -> NDArray[np.int32]:
        return np.random.default_rng(seed).lognormal(np.log(median), sigma, samples).clip(16, longest).astype(np.int32)

    return draw


def _two_kinds(samples: int, seed: int) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(samples) < 0.2, 4096, rng.normal(300, 80, samples)).clip(16, 4096).astype(np.int32)


LENGTHS: dict[str, Callable[[int, int], NDArray[np.int32]]] = {
    "log-normal (512, 0.9)": _lognormal(512, 0.9, 4096),
    "log-normal (2048, 1.0)": _lognormal(2048, 1.0, LONGEST),
    "20 % at 4,096": _two_kinds,
}


def _report_lockstep() -> Iterator[str]:
    yield f"### Planned efficiency in lockstep: all ranks together / each alone, {SAMPLES_A_RANK} samples a rank, budget {BUDGET}"
    yield from ("", "| lengths | packing | 8 ranks | 64 | 512 |", "|---|---|---|---|---|")
    for name, draw in LENGTHS.items():
        for packing in PACKINGS:
            cells = [_measure_lockstep(draw, packing, world, seeds=5 if world < 512 else 2) for world in (8, 64, 512)]
            yield (
                f"| {name} | {packing} | "
                + " | ".join(f"{100 * of_all:.1f} / {100 * of_each:.1f} %" for of_all, of_each in cells)
                + " |"
            )


def _measure_lockstep(draw: Callable[[int, int], NDArray[np.int32]], packing: str, world: int, seeds: int) -> tuple[float, float]:
    """The efficiency of the plan of all ranks, and that of each rank's own plan of its samples."""
    rows = []
    for seed in range(seeds):
        lengths = draw(SAMPLES_A_RANK * world, seed)
        work, time_of_ranks = _plan_of_all(lengths, packing, world).lockstep()
        rows.append((work / time_of_ranks, _lockstep_of_each(lengths, packing, world)))
    of_all, of_each = np.mean(rows, axis=0)
    return float(of_all), float(of_each)


def _plan_of_all(lengths: NDArray[np.int32], packing: str, world: int) -> RankPlans:
    atoms = plan_atoms(np.arange(len(lengths))[:, None], lengths, _config(packing), world)
    return RankPlans([atoms], lengths, RankShare(0, world), padding_free=packing == "padding_free")


def _lockstep_of_each(lengths: NDArray[np.int32], packing: str, world: int) -> float:
    """Each rank plans its own samples, its costliest micro-batch first, and waits for the others
    after every micro-batch. A rank with fewer has none at the end."""
    cost = lengths.astype(np.int64) * (LINEAR + QUADRATIC * lengths.astype(np.int64))
    slowest: list[int] = []
    for part in np.array_split(np.arange(len(lengths)), world):
        costs = [cost[part[rows]] for rows in plan_lines(np.ascontiguousarray(lengths[part]), _config(packing))]
        computed = sorted((int(c.sum() if packing == "padding_free" else len(c) * c.max()) for c in costs), reverse=True)
        slowest = [max(pair) for pair in zip(_extend(slowest, computed), _extend(computed, slowest), strict=True)]
    return float(cost.sum() / (world * sum(slowest)))


def _report_imbalance(seeds: int = 20) -> Iterator[str]:
    yield f"### Cost of the costliest rank / the mean: each its own samples -> all ranks together, {SAMPLES_A_RANK} samples a rank"
    yield from ("", "| lengths | packing | 2 ranks | 4 | 8 |", "|---|---|---|---|---|")
    for name, draw in LENGTHS.items():
        for packing in PACKINGS:
            cells = []
            for world in (2, 4, 8):
                drawn = [draw(SAMPLES_A_RANK * world, seed) for seed in range(seeds)]
                alone, together = (
                    np.mean([_imbalance(rows_of(lengths, packing, world), lengths, packing) for lengths in drawn])
                    for rows_of in (_rows_of_each, _rows_of_all)
                )
                cells.append(f"{alone:.2f} -> {together:.3f}")
            yield f"| {name} | {packing} | " + " | ".join(cells) + " |"


def _rows_of_each(lengths: NDArray[np.int32], packing: str, world: int) -> list[list[NDArray[np.int64]]]:
    """The micro-batches of each rank that plans its own samples."""
    parts = np.array_split(np.arange(len(lengths)), world)
    return [[part[rows] for rows in plan_lines(np.ascontiguousarray(lengths[part]), _config(packing))] for part in parts]


def _rows_of_all(lengths: NDArray[np.int32], packing: str, world: int) -> list[list[NDArray[np.int64]]]:
    """The micro-batches of each rank in the plan of all, equally many."""
    plans = plan_atoms(np.arange(len(lengths))[:, None], lengths, _config(packing), world).plans
    assert len({len(plan) for plan in plans}) == 1
    return [list(plan) for plan in plans]


def _imbalance(ranks: list[list[NDArray[np.int64]]], lengths: NDArray[np.int32], packing: str) -> float:
    cost = lengths.astype(np.int64) * (LINEAR + QUADRATIC * lengths.astype(np.int64))
    sums = [
        sum(int(cost[rows].sum() if packing == "padding_free" else len(rows) * cost[rows].max(initial=0)) for rows in each)
        for each in ranks
    ]
    return float(max(sums) / np.mean(sums))


def _extend(values: list[int], other: list[int]) -> list[int]:
    return values + [0] * (len(other) - len(values))


def _report_plans() -> Iterator[str]:
    yield f"### Cost of a plan of all ranks, log-normal (512, 0.9), least of {ROUNDS}"
    yield from ("", "| ranks | samples | packing | plan | with `ranks/lockstep` |", "|---|---|---|---|---|")
    for world, samples in ((8, 4096), (64, 16384), (512, 16384), (4096, 131072)):
        lengths = LENGTHS["log-normal (512, 0.9)"](samples, 0)
        for packing in PACKINGS:
            plan_ms = _least_ms(lambda: _plan_of_all(lengths, packing, world))  # noqa: B023
            both_ms = _least_ms(lambda: _plan_of_all(lengths, packing, world).lockstep())  # noqa: B023
            yield f"| {world} | {samples:,} | {packing} | {plan_ms:.1f} ms | {both_ms:.1f} ms |"


def _least_ms(run: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Processor time, which excludes other processes."""
    return 1e3 * min(_seconds(run, time.process_time) for _ in range(rounds))


def _seconds(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    run()
    return clock() - begin


def _report_bookkeeping(samples: int = 4096, worlds: Sequence[int] = (2, 8)) -> Iterator[str]:
    """What a step does besides computing: on one process alone, and through `SharedBatches` on
    real ranks, which share the cores of this machine. Rank 0 has the most to do: the sum is its
    time where each rank has a core."""
    world = max(worlds)
    items = list_items(samples)
    tokens = sum(len(item.input_ids) for item in items)
    sent = encode_batch(SAWBatch(items))
    decoded = decode_batch(*sent).items
    batch = replace(MacroBatch.ingest(decoded, 4096), share=RankShare(0, world))
    rows = np.arange(len(decoded))
    size = f"{samples:,} samples, {tokens:,} tokens, {sum(map(len, sent)) / 1e6:.1f} MB"
    yield f"### Bookkeeping of a step: {size}; least of {ROUNDS}"
    yield from ("", "| work | ms |", "|---|---|")
    after = {
        "a rank decodes": _least_ms(lambda: decode_batch(*sent)),
        "a rank ingests what it decoded": _least_ms(lambda: MacroBatch.ingest(decoded, 4096)),
        f"a rank plans for {world}, with the totals": _least_ms(lambda: MiniBatch(batch, rows, _config("optimal"))),
    }
    given = {"lists": items, "what a queue delivers": with_arrays(items, of_a_queue=True), "arrays": with_arrays(items)}
    encoded = {name: _least_ms(lambda: encode_batch(SAWBatch(each))) for name, each in given.items()}  # noqa: B023
    for name, ms in encoded.items():
        yield f"| rank 0 encodes {name} | {ms:.0f} |"
    for name, ms in after.items():
        yield f"| {name} | {ms:.0f} |"
    yield f"| one process ingests the lists instead | {_least_ms(lambda: MacroBatch.ingest(items, 4096)):.0f} |"
    for world in worlds:
        for name, each in given.items():
            broadcast, whole = _on_ranks(world, each)
            total = encoded[name] + broadcast + sum(after.values())
            yield f"| {world} gloo processes, {name}: broadcast alone | {broadcast:.0f} |"
            yield f"| {world} gloo processes, {name}: all of it, on the cores of this machine | {whole:.0f} |"
            yield f"| {world} gloo processes, {name}: the sum of rank 0's parts | {total:.0f} |"


class _SameBatch(BatchSourceBase):
    shards_across_ranks = False

    def __init__(self, items: list[SAWItem]) -> None:
        self._items = items

    async def next_batch(self) -> SAWBatch:
        return SAWBatch(self._items)


def _on_ranks(world: int, items: list[SAWItem]) -> tuple[float, float]:
    """Least ms of the broadcast, and of a step's bookkeeping, until the last rank is done."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    processes = [context.Process(target=_rank, args=(rank, world, store, items, results)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * world
    broadcast, whole = results.get()
    return float(broadcast), float(whole)


def _rank(rank: int, world: int, store: str, items: list[SAWItem], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    source = SharedBatches(_SameBatch(items) if rank == 0 else None)
    column = torch.zeros(27_400_000, dtype=torch.uint8)
    broadcast, whole = [], []
    for _ in range(ROUNDS):
        dist.barrier()
        broadcast.append(_seconds(lambda: (dist.broadcast(column, 0), dist.barrier())))
        dist.barrier()
        whole.append(_seconds(lambda: (_bookkeeping(source, rank, world), dist.barrier())))
    if rank == 0:
        results.put((1e3 * min(broadcast), 1e3 * min(whole)))
    dist.barrier()
    dist.destroy_process_group()


def _bookkeeping(source: SharedBatches, rank: int, world: int) -> None:
    async def run() -> None:  # returns nothing: `asyncio.run` formats what it returns as text
        items = (await source.next_batch()).items
        batch = MacroBatch.ingest(items, 4096)
        all_have_samples(SAME_BATCH, "cpu")
        shared = replace(batch, share=RankShare(rank, world))
        MiniBatch(shared, np.arange(len(items)), _config("optimal"))

    asyncio.run(run())
