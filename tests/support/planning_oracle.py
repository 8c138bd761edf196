"""Slow and obvious Python versions of the planners, and the inputs on which both must agree."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Lists = list[list[int]]
LONGEST = 2**31 - 1
Result = TypeVar("Result")


def int32(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(lengths, np.int32)


@st.composite
def workloads(draw: st.DrawFn, most: int = 60) -> tuple[list[int], int]:
    """Lengths with few or many ties, and a budget that fits the longest sample exactly, a few
    times, or fits all samples."""
    longest = draw(st.sampled_from([1, 3, 12, 100, 5000, LONGEST]))
    lengths = draw(st.lists(st.integers(0, longest), max_size=most))
    least = max([1, *lengths])
    budget = draw(st.one_of(st.integers(least, 2 * least), st.integers(least, 50 * least), st.just(10**30)))
    return lengths, budget


overheads = st.one_of(st.integers(0, 300), st.sampled_from([10**5, 2**40, 2**63, 10**30]))


def w1(samples: int, seed: int) -> NDArray[np.int32]:
    """Workload W1: lognormal around 512 tokens, clipped to [16, 4096]."""
    draws = np.random.default_rng(seed).lognormal(np.log(512), 0.9, samples)
    return np.clip(draws, 16, 4096).astype(np.int32)


def ascending(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: lengths[index])


def padded(lengths: Sequence[int], rows: Sequence[int]) -> int:
    return len(rows) * max((int(lengths[row]) for row in rows), default=0)


def cost(lengths: Sequence[int], lists: Lists, overhead: int) -> int:
    return sum(padded(lengths, rows) for rows in lists) + overhead * len(lists)


def greedy(lengths: Sequence[int], budget: int) -> Lists:
    """The documented greedy algorithm, sample by sample."""
    lists: Lists = []
    for index in ascending(lengths):
        if lists and lengths[index] * (len(lists[-1]) + 1) <= budget:
            lists[-1].append(index)
        else:
            lists.append([index])
    return lists


def optimal(lengths: Sequence[int], budget: int, overhead: int) -> Lists:
    """Quadratic dynamic programming over the sorted samples. On ties, the last micro-batch starts
    as early as possible."""
    order = ascending(lengths)
    best = [(0, 0)]
    for end in range(1, len(order) + 1):
        rows = [(begin, lengths[order[end - 1]] * (end - begin)) for begin in range(end)]
        best.append(min((best[begin][0] + overhead + tokens, begin) for begin, tokens in rows if tokens <= budget))
    lists: Lists = []
    end = len(order)
    while end:
        lists.insert(0, order[best[end][1] : end])
        end = best[end][1]
    return lists


def best_fit_decreasing(lengths: Sequence[int], budget: int) -> Lists:
    """Longest sample first, each into the fullest bin that has room. Among equally full bins, the
    one that reached that level first."""
    bins: list[tuple[int, int, list[int]]] = []
    for turn, index in enumerate(sorted(range(len(lengths)), key=lambda index: -lengths[index])):
        length = lengths[index]
        fits = [(free, since, number) for number, (free, since, _) in enumerate(bins) if free >= length]
        if not fits:
            bins.append((budget - length, turn, [index]))
            continue
        free, since, number = min(fits)
        bins[number] = (free - length, turn if length else since, [*bins[number][2], index])
    return [rows for _, _, rows in bins]


def contiguous_partitions(lengths: Sequence[int]) -> Iterator[Lists]:
    """Every partition of the sorted samples into contiguous parts."""
    order = ascending(lengths)
    for cuts in itertools.product([False, True], repeat=max(0, len(order) - 1)):
        ends = [end for end, cut in enumerate(cuts, start=1) if cut] + [len(order)] * bool(order)
        yield [order[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def set_partitions(samples: int) -> Iterator[Lists]:
    """Every partition of `range(samples)` into sets."""
    if samples == 0:
        yield []
        return
    for smaller in set_partitions(samples - 1):
        for block in range(len(smaller)):
            yield [[*rows, samples - 1] if number == block else rows for number, rows in enumerate(smaller)]
        yield [*smaller, [samples - 1]]


def cheapest(lengths: Sequence[int], budget: int, overhead: int, partitions: Iterable[Lists]) -> int:
    """The lowest cost among the partitions within the budget."""
    feasible = (lists for lists in partitions if all(padded(lengths, rows) <= budget for rows in lists))
    return min(cost(lengths, lists, overhead) for lists in feasible)


def least_seconds(run: Callable[[], Result], tries: int = 5) -> tuple[float, Result]:
    """Least CPU time of a few runs, since other work runs on the machine."""
    times = []
    for _ in range(tries):
        begin = time.process_time()
        result = run()
        times.append(time.process_time() - begin)
    return min(times), result
