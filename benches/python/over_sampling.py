"""What over-sampling gains and costs, measured on the real pool of groups:
`python -m benches.python.over_sampling`.

Batches of 32 groups of 8 members, whose times are lognormal(0, 1), at most 16, on a virtual clock;
training takes no time. `ratio` is the time of a batch relative to waiting for all groups that were
begun. No rule that trains every group within K batches can be below `bound`, which is max(1 / (K +
1), E[group] / (factor * E[wait for all])): the slowest group of those admitted together must fit
into K + 1 batches, and Little's law. `bias` is the mean time of the trained groups over that of all
admitted ones.

`--crashes N` kills N random runs at random moments instead, and counts what was lost, doubled or
split. `--cost` measures the processor time of a call. `--vllm` asks a real server.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ludic.errors import RequestsExhausted
from ludic.training.rollouts.group_ledger import PoolCounts
from ludic.training.rollouts.group_pool import GroupPool, Ticket

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from jumping_loop import play_jumping
from pool_playing import CountedPrompts, Fate, play_killed

GROUPS, MEMBERS, CAP = 32, 8, 16.0
ROWS = [(1.25, 1, "arrival"), (1.5, 1, "arrival"), (1.5, 2, "arrival"), (2.0, 4, "arrival"), (1.5, 1, "submission")]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    factor: float
    max_lag: int
    order: str
    ratio: float
    bound: float
    mean_lag: float
    largest_lag: int
    bias: float
    thrown_away: int


class Times:
    """The time that each member takes, drawn once."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self._members: list[list[float]] = []

    def of_group(self, ordinal: int) -> list[float]:
        while len(self._members) <= ordinal:
            self._members.append([min(CAP, math.exp(self._rng.gauss(0, 1))) for _ in range(MEMBERS)])
        return self._members[ordinal]

    def longest(self, ordinal: int) -> float:
        return max(self.of_group(ordinal))


def measure_row(factor: float, max_lag: int, order: str, *, batches: int, whole_groups: bool = False, seed: int = 0) -> Row:
    """Train `batches` batches and measure them, then train the groups that are still in the air.

    `whole_groups`: one call a group instead of one a member, which takes as long and computes
    faster."""
    times = Times(seed)
    in_the_air = math.ceil(GROUPS * factor)

    async def play(ticket: Ticket) -> None:
        await asyncio.sleep(times.longest(ticket.ordinal) if whole_groups else times.of_group(ticket.ordinal)[ticket.member])

    async def train() -> tuple[float, list[Any], PoolCounts]:
        settings: dict[str, Any] = {"groups_per_batch": GROUPS, "members_per_group": 1 if whole_groups else MEMBERS}
        settings |= {"over_sampling_factor": factor, "max_lag": max_lag, "order": order}
        prompts = CountedPrompts(batches * GROUPS + in_the_air)
        async with GroupPool(play=play, accept=lambda group: True, prompts=prompts, **settings) as pool:
            measured = [await pool.next_batch() for _ in range(batches)]
            elapsed = asyncio.get_running_loop().time()
            with suppress(RequestsExhausted):
                while True:
                    await pool.next_batch()
        return elapsed, measured, pool.counts

    elapsed, measured, counts = play_jumping(train())
    assert all(len(batch) == GROUPS for batch in measured)
    lags = [lag for batch in measured for lag in batch.lags]
    longest = [times.longest(i) for i in range(batches * GROUPS)]
    wait_for_all = fmean(max(longest[first : first + GROUPS]) for first in range(0, len(longest), GROUPS))
    return Row(
        factor,
        max_lag,
        order,
        ratio=elapsed / batches / wait_for_all,
        bound=max(1 / (max_lag + 1), fmean(longest) / (factor * wait_for_all)),
        mean_lag=fmean(lags),
        largest_lag=max(lags),
        bias=fmean(times.longest(group.ordinal) for batch in measured for group in batch) / fmean(longest),
        thrown_away=counts.admitted - counts.given,
    )


def kill_random_runs(number: int, *, seed: int = 0) -> dict[str, int]:
    """Runs of 40 prompts with random settings; 30 % of groups are rejected, 5 % of calls fail, 2 %
    of groups always do. Every law is checked in every run (`KilledRun.check`)."""
    rng = random.Random(seed)
    totals = Counter[str]()
    for run_number in range(number):
        max_lag = rng.randint(0, 3)
        settings = {
            "groups_per_batch": rng.randint(1, 5),
            "members_per_group": rng.randint(1, 4),
            "over_sampling_factor": rng.uniform(1, 1 + max_lag),
            "max_lag": max_lag,
            "order": rng.choice(["arrival", "submission"]),
            "max_concurrency": rng.choice([None, 2, 8]),
            "max_retries": rng.randint(1, 3),
            "patience": 1000,
        }
        fate = Fate(rng.randrange(2**31), rejected=0.3, failing=0.05, doomed=0.08)  # one group of four can be doomed
        run = play_killed(fate, settings, total=40, kills=rng.randint(1, 3), draw=rng.random)
        try:
            run.check(fate)
        except AssertionError as error:
            totals["failed"] += 1
            print(f"run {run_number} with {settings}: {error}", flush=True)
        counts = run.counts
        totals.update(runs=1, kills=run.kills, given=counts.given, rejected=counts.rejected, lost=counts.lost)
    return dict(totals)


def measure_call_us(groups: int, *, members: int = 8, batches: int = 20) -> float:
    """Processor time of a call of the pool in microseconds with `groups` kept; the task and the
    `await` of the call are included."""

    async def play(ticket: Ticket) -> None:
        await asyncio.sleep(0)

    async def train() -> float:
        pool = GroupPool(
            play=play,
            accept=lambda group: True,
            prompts=CountedPrompts(),
            groups_per_batch=groups // 2,
            members_per_group=members,
            over_sampling_factor=2.0,
            max_concurrency=256,
        )
        async with pool:
            await pool.next_batch()
            started, given = time.process_time(), pool.counts.given
            for _ in range(batches):
                await pool.next_batch()
            return 1e6 * (time.process_time() - started) / ((pool.counts.given - given) * members)

    return min(asyncio.run(train()) for _ in range(3))


def print_table(batches: int) -> None:
    print("| factor, K, order | ratio | bound | ratio / bound | mean lag | largest lag | bias | thrown away |")
    print("|---|---|---|---|---|---|---|---|")
    for factor, max_lag, order in ROWS:
        row = measure_row(factor, max_lag, order, batches=batches)
        cells = [f"{factor:g}, {max_lag}, {order}", f"{row.ratio:.3f}", f"{row.bound:.3f}", f"{row.ratio / row.bound:.2f}"]
        cells += [f"{row.mean_lag:.2f}", str(row.largest_lag), f"{row.bias:.4f}", str(row.thrown_away)]
        print("|", " | ".join(cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.over_sampling", description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, help="400; with --vllm 12")
    parser.add_argument("--crashes", type=int, default=0)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of --vllm: how often each row is measured")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # every lost group is logged
    if options.vllm:
        from benches.python import over_sampling_vllm

        over_sampling_vllm.measure(options.batches or 12, options.rounds)
    elif options.crashes:
        print(kill_random_runs(options.crashes, seed=options.seed))
    elif options.cost:
        for groups in (64, 4096):
            print(f"{groups} groups: {measure_call_us(groups, batches=320 if groups == 64 else 5):.1f} us a call")
    else:
        print_table(options.batches or 400)


if __name__ == "__main__":
    main()
