"""Planning of micro-batches from lengths: the core compared with the documented algorithms in plain
Python and with numpy.

`contests` compares speed; `report` measures what the plans save and how well ranks are balanced.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from benches.python.contest import Contender, Contest
from benches.python.samples import draw_lengths
from numpy.typing import NDArray

from ludic import _core
from ludic.training.batching.rank_plans import LINEAR, QUADRATIC

BUDGET = 16384
OVERHEAD = 256
Lists = list[list[int]]


def greedy(lengths: Sequence[int]) -> Lists:
    """The documented algorithm: ascending stable sort, a new micro-batch when `longest * rows`
    exceeds the budget."""
    plan: Lists = []
    rows: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        longest = max(longest, lengths[index])
        if rows and longest * (len(rows) + 1) > BUDGET:
            plan.append(rows)
            rows, longest = [], lengths[index]
        rows.append(index)
    return [*plan, rows] if rows else plan


def greedy_by_numpy(lengths: NDArray[np.int32]) -> Lists:
    """The same by one `argsort` and one `searchsorted` per micro-batch, which finds the first
    product of length and rows above the budget."""
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order].astype(np.int64)
    ranks = np.arange(1, len(order) + 1)
    plan, begin, reach = [], 0, BUDGET // 16
    while begin < len(order):
        window = ascending[begin : begin + reach] * ranks[: min(reach, len(order) - begin)]
        end = begin + int(np.searchsorted(window, BUDGET, side="right"))
        plan.append(order[begin:end].tolist())
        begin = end
    return plan


def best_fit_decreasing(lengths: Sequence[int]) -> Lists:
    """Longest first, each into the fullest micro-batch that holds it, by bisection."""
    plan: Lists = []
    free: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        at = bisect_left(free, (lengths[index], 0))
        space, number = free.pop(at) if at < len(free) else (BUDGET, len(plan))
        if number == len(plan):
            plan.append([])
        plan[number].append(index)
        insort(free, (space - lengths[index], number))
    return plan


def optimal(lengths: Sequence[int]) -> Lists:
    """The exact optimum by dynamic programming over ascending lengths. Each end looks back as
    far as the budget allows."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best, begins = [0], [0]
    for end, index in enumerate(order, start=1):
        longest = lengths[index]
        reach = range(max(0, end - BUDGET // longest), end)
        cost, begin = min((best[begin] + (end - begin) * longest, begin) for begin in reach)
        best.append(cost + OVERHEAD)
        begins.append(begin)
    plan: Lists = []
    end = len(order)
    while end:
        plan.append(order[begins[end] : end])
        end = begins[end]
    return plan[::-1]


def split(sequences: list[list[int]]) -> list[list[list[int]]]:
    """The greedy split of sequences into micro-batches, by the core."""
    return _core.plan_greedy(_core.lengths_of(sequences), BUDGET).split(sequences)


def split_in_python(sequences: list[list[int]]) -> list[list[list[int]]]:
    """The same in plain Python."""
    plan: list[list[list[int]]] = []
    rows: list[list[int]] = []
    longest = 0
    for sequence in sorted(sequences, key=len):
        longest = max(longest, len(sequence))
        if rows and longest * (len(rows) + 1) > BUDGET:
            plan.append(rows)
            rows, longest = [], len(sequence)
        rows.append(sequence)
    return [*plan, rows] if rows else plan


def contests() -> Iterator[Contest]:
    """The split of lists, then each planner on an array of lengths."""
    sequences = [[0] * length for length in draw_lengths(1000).tolist()]
    yield Contest(
        "Greedy split of 1000 lists into lists",
        1000,
        "sequence",
        [
            Contender("plain Python", lambda: split_in_python(sequences)),
            Contender("core", lambda: split(sequences), _assert_equal, repeats=20),
        ],
    )
    for samples in (1000, 10_000, 100_000):
        yield from _contests_on_arrays(samples)


def _contests_on_arrays(samples: int) -> Iterator[Contest]:
    array = draw_lengths(samples)
    lengths = array.tolist()
    repeats = max(1, 20_000 // samples)

    def contender(name: str, planner: Callable[..., _core.Plan], *settings: int, check: Any = _assert_same_plan) -> Contender:
        return Contender(name, lambda: planner(array, BUDGET, *settings), check, repeats)

    yield Contest(
        f"Greedy plan of {samples} lengths",
        samples,
        "sequence",
        [
            Contender("plain Python", lambda: greedy(lengths)),
            Contender("numpy", lambda: greedy_by_numpy(array), _assert_equal),
            contender("core, greedy", _core.plan_greedy),
            contender("core, optimal", _core.plan_optimal, OVERHEAD, check=None),
        ],
    )
    yield Contest(
        f"Plan of {samples} lengths without padding",
        samples,
        "sequence",
        [
            Contender("plain Python, bisection", lambda: best_fit_decreasing(lengths)),
            contender("core", _core.plan_padding_free, check=_assert_not_more),
        ],
    )
    if samples <= 10_000:
        yield Contest(
            f"Exact optimum of {samples} lengths",
            samples,
            "sequence",
            [
                Contender("plain Python", lambda: optimal(lengths)),
                contender("core", _core.plan_optimal, OVERHEAD),
            ],
        )


def _assert_equal(got: Any, want: Any) -> None:
    assert got == want


def _assert_same_plan(got: _core.Plan, want: Lists) -> None:
    assert got.to_lists() == want


def _assert_not_more(got: _core.Plan, want: Lists) -> None:
    assert len(got) <= len(want)


def report() -> str:
    """What the plans save, as means over seeds of the workload W1."""
    return "\n".join([*_report_savings(), "", *_report_excess(), "", *_report_balance(), ""])


def _report_savings(seeds: int = 50) -> Iterator[str]:
    yield f"### Cost of an optimal plan against greedy's: padded tokens + {OVERHEAD} per micro-batch, budget {BUDGET}"
    yield from ("", "| samples | greedy: real / padded | optimal: real / padded | cost saved |", "|---|---|---|---|")
    for samples in (32, 128, 512):
        rows = []
        for seed in range(seeds):
            lengths = draw_lengths(samples, seed)
            plans = _core.plan_greedy(lengths, BUDGET), _core.plan_optimal(lengths, BUDGET, OVERHEAD)
            costs = [plan.padded_tokens + OVERHEAD * len(plan) for plan in plans]
            rows.append([*(plan.num_tokens / plan.padded_tokens for plan in plans), 1 - costs[1] / costs[0]])
        greedy_share, optimal_share, saved = 100 * np.mean(rows, axis=0)
        yield f"| {samples} | {greedy_share:.1f} % | {optimal_share:.1f} % | {saved:.1f} % |"


def _report_excess(seeds: int = 50) -> Iterator[str]:
    yield f"### Micro-batches without padding, budget {BUDGET}: number above the fewest that the tokens allow"
    yield from ("", "| samples | mean excess | largest excess | over the budget |", "|---|---|---|---|")
    for samples in (32, 128, 1000, 10_000, 100_000):
        excess, over = [], 0
        for seed in range(seeds if samples <= 10_000 else 5):
            lengths = draw_lengths(samples, seed)
            plan = _core.plan_padding_free(lengths, BUDGET)
            excess.append(len(plan) + -int(lengths.sum()) // BUDGET)
            over += sum(int(lengths[rows].sum()) > BUDGET for rows in plan)
        yield f"| {samples} | {np.mean(excess):.2f} | {max(excess)} | {over} |"


def _report_balance(seeds: int = 20, ranks: int = 8) -> Iterator[str]:
    yield f"### {ranks} ranks, budget {BUDGET}: cost of the samples, relative to the cost of ranks that wait for each other"
    yield from ("", "| packing | samples | each step | at the end | steps | ms |", "|---|---|---|---|---|---|")
    for packing in ("greedy", "optimal", "padding_free"):
        for samples in (256, 1000, 1024, 4096):
            rows = [_measure_balance(draw_lengths(samples, seed), packing, ranks) for seed in range(seeds)]
            step, end, steps, seconds = np.mean(rows, axis=0)
            yield f"| {packing} | {samples} | {100 * step:.2f} % | {100 * end:.2f} % | {steps:.1f} | {1000 * seconds:.2f} |"


def _measure_balance(lengths: NDArray[np.int32], packing: str, ranks: int) -> tuple[float, float, int, float]:
    """The share of useful cost if ranks wait after each step, the share if they wait only at the
    end, the number of steps, and the seconds of planning."""
    begin = time.perf_counter()
    plans = _core.plan_ranks(lengths, BUDGET, ranks, packing)
    seconds = time.perf_counter() - begin
    cost = lengths.astype(np.int64) * (LINEAR + QUADRATIC * lengths.astype(np.int64))

    def computed_cost(rows: NDArray[np.int64]) -> int:
        return int(cost[rows].sum() if packing == "padding_free" else len(rows) * cost[rows].max(initial=0))

    costs_RS = np.array([[computed_cost(rows) for rows in plan] for plan in plans])  # ranks, steps
    even_share = cost.sum() / ranks
    return even_share / costs_RS.max(axis=0).sum(), even_share / costs_RS.sum(axis=1).max(), costs_RS.shape[1], seconds
