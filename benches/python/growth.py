"""Growth of time and memory with tokens, samples, vocabulary and ranks, as plots.

    python -m benches.python growth            # prints the numbers, writes target/benches/growth.*
    python -m benches.python.growth --renew    # measures nothing: docs get the numbers written last
    python -m benches.python.growth --renew docs/growth.json    # or these; the plot is drawn again

`--renew` writes docs/growth.json, docs/growth.svg and the table of benches/results/speed.md,
so that the page always has the numbers of the plot. Measuring alone changes no page.

Every point is the least of several rounds, on one thread, in processor time. Memory of torch is
counted (`peak_bytes`), that of the core is the size of what it returns. Log-probabilities are those
of a quarter of the tokens, forward and backward, at a width of 256.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benches.python.contest import Contest
from benches.python.samples import draw_lengths, list_items, with_arrays
from benches.python.token_scores import measure, with_logits, without_logits

from ludic import _core

ROOT = Path(__file__).parents[2]
DOCS, MEASURED = ROOT / "docs", ROOT / "target" / "benches"
PAGE = ROOT / "benches" / "results" / "speed.md"
TOKENS = (512, 1024, 2048, 4096)
VOCABULARIES = (8192, 16384, 32768, 65536, 131072)
SAMPLES = (128, 512, 2048, 8192)
RANKS = (1, 4, 16, 64, 256)
WIDTH, BUDGET, ROUNDS, SAMPLES_A_RANK = 256, 16384, 3, 64
Point = dict[str, float]
Table = dict[str, dict[str, list[Point]]]
"""What grows -> way -> points with `x`, `seconds` and `bytes`."""
AXES = {
    "tokens": f"tokens, vocabulary {VOCABULARIES[2]:,}",
    "vocabulary": f"vocabulary, {TOKENS[1]:,} tokens",
    "samples": "samples of about 700 tokens",
    "ranks": f"ranks of {SAMPLES_A_RANK} samples",
}


def contests() -> Iterator[Contest]:
    """Nothing is compared with a reference here: `report` measures."""
    yield from ()


def report() -> str:
    """Measure, write `growth.json` and `growth.svg` to `MEASURED`, and return the numbers."""
    table = measure_all()
    write(table, MEASURED)
    return format_growth(table)


def write(table: Table, folder: Path) -> None:
    """Write the numbers and their plot to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    draw(table, folder / "growth.svg")


def renew(table: Table, docs: Path, page: Path) -> None:
    """Write the numbers and their plot to `docs`, and the table to `page`."""
    text = with_table(page.read_text(encoding="utf-8"), format_growth(table))
    write(table, docs)
    page.write_text(text, encoding="utf-8")


def with_table(page: str, growth: str) -> str:
    """The page with the table of `format_growth` in place of the one that begins with its first
    line. Raises `ValueError` if the page has none."""
    fresh = [line for line in growth.splitlines() if line.startswith("|")]
    lines = page.splitlines()
    if fresh[0] not in lines:
        raise ValueError(f"the page has no table that begins with {fresh[0]!r}; put this line where it belongs")
    first = lines.index(fresh[0])
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    lines[first : first + len(list(rows))] = fresh
    return "\n".join(lines) + "\n"


def measure_all(
    tokens: Sequence[int] = TOKENS,
    vocabularies: Sequence[int] = VOCABULARIES,
    samples: Sequence[int] = SAMPLES,
    ranks: Sequence[int] = RANKS,
    rounds: int = ROUNDS,
) -> Table:
    """The points of every curve."""
    ways = {"all logits": with_logits, "no logits": without_logits}

    def score(way: Any, tokens: int, vocabulary: int) -> Point:
        least = min((measure(way, (1, tokens, WIDTH, vocabulary)) for _ in range(rounds)), key=lambda each: each["seconds"])
        return {"seconds": least["seconds"], "bytes": least["bytes"]}

    return {
        "tokens": {name: [{"x": x, **score(way, x, VOCABULARIES[2])} for x in tokens] for name, way in ways.items()},
        "vocabulary": {name: [{"x": x, **score(way, TOKENS[1], x)} for x in vocabularies] for name, way in ways.items()},
        "samples": _grow_samples(samples, rounds),
        "ranks": {"plan of all ranks": [{"x": x, **_plan(x, rounds)} for x in ranks]},
    }


def _grow_samples(counts: Sequence[int], rounds: int) -> dict[str, list[Point]]:
    """Bookkeeping of a macro-batch: samples to a table, its plan, and all micro-batches."""
    points: dict[str, list[Point]] = {"read lists": [], "read arrays": [], "plan": [], "collate": []}
    for count in counts:
        lists = list_items(count)
        arrays = with_arrays(lists)
        table = _core.SampleTable.from_items(arrays)
        lengths, size = table.lengths, float(len(table.to_bytes()))
        plan = _core.plan_optimal(lengths, BUDGET)
        rows = [plan[k] for k in range(len(plan))]
        largest = max(_size_of(table.collate(each, 0)) for each in rows)
        parts = float(plan.indices.nbytes + plan.offsets.nbytes)
        for name, run, bytes_ in (
            ("read lists", lambda lists=lists: _core.SampleTable.from_items(lists), size),
            ("read arrays", lambda arrays=arrays: _core.SampleTable.from_items(arrays), size),
            ("plan", lambda lengths=lengths: _core.plan_optimal(lengths, BUDGET), parts),
            ("collate", lambda table=table, rows=rows: [table.collate(each, 0) and None for each in rows], largest),
        ):
            points[name].append({"x": count, "seconds": _least_seconds(run, rounds), "bytes": bytes_})
    return points


def _size_of(batch: dict[str, Any]) -> float:
    return float(sum(value.nbytes for value in batch.values() if hasattr(value, "nbytes")))


def _plan(ranks: int, rounds: int) -> Point:
    lengths = draw_lengths(ranks * SAMPLES_A_RANK)

    def run() -> Any:
        return _core.plan_ranks(lengths, BUDGET, ranks)

    bytes_ = sum(plan[k].nbytes for plan in run() for k in range(len(plan)))
    return {"seconds": _least_seconds(run, rounds), "bytes": float(bytes_)}


def _least_seconds(run: Callable[[], object], rounds: int) -> float:
    """Of one run; short runs are repeated for 20 ms and divided."""
    begin = time.process_time()
    run()
    repeats = max(1, math.ceil(0.02 / max(time.process_time() - begin, 1e-5)))
    best = math.inf
    for _ in range(rounds):
        begin = time.process_time()
        for _ in range(repeats):
            run()
        best = min(best, (time.process_time() - begin) / repeats)
    return best


def format_growth(table: Table) -> str:
    """One line for each curve: numbers at its ends, and the exponent between them."""
    lines = ["### Growth", "", "| curve | from, to | seconds | exponent | MB | exponent |", "|---|---|---|---|---|---|"]
    for axis, curves in table.items():
        for name, points in curves.items():
            first, last = points[0], points[-1]
            cells = [f"{first['x']:,.0f}, {last['x']:,.0f} {axis}"]
            for key, unit in (("seconds", 1.0), ("bytes", 1e-6)):
                exponent = math.log(last[key] / first[key]) / math.log(last["x"] / first["x"])
                cells += [f"{first[key] * unit:.3g}, {last[key] * unit:.3g}", f"{exponent:.2f}"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def draw(table: Table, path: Path) -> None:
    """Time above, memory below; all axes are logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "growth", "font.family": "sans-serif", "font.size": 9}):
        figure, axes = plt.subplots(2, len(table), figsize=(12, 5.6), layout="constrained", sharex="col", squeeze=False)
        for column, (axis, curves) in enumerate(table.items()):
            for name, points in curves.items():
                x = [point["x"] for point in points]
                axes[0, column].plot(x, [point["seconds"] * 1e3 for point in points], marker="o", markersize=3, label=name)
                axes[1, column].plot(x, [point["bytes"] / 1e6 for point in points], marker="o", markersize=3, label=name)
            axes[0, column].legend(frameon=False)
            axes[1, column].set_xlabel(AXES[axis])
            for row in (0, 1):
                axes[row, column].set(xscale="log", yscale="log")
                axes[row, column].minorticks_off()
                axes[row, column].set_xticks(x, [_short(each) for each in x])
                axes[row, column].grid(visible=True, alpha=0.3)
        axes[0, 0].set_ylabel("ms")
        axes[1, 0].set_ylabel("MB")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _short(number: float) -> str:
    """1024 as 1k."""
    return f"{number / 1024:.0f}k" if number >= 1024 else f"{number:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--renew",
        nargs="?",
        type=Path,
        const=MEASURED / "growth.json",
        metavar="JSON",
        help="measure nothing: put these numbers, by default those measured last, in docs",
    )
    torch.set_num_threads(1)
    source = parser.parse_args().renew
    if source is None:
        print(report())
        return
    if not source.is_file():
        parser.error(f"{source} is not there; measure first: python -m benches.python growth")
    table = json.loads(source.read_text(encoding="utf-8"))
    renew(table, DOCS, PAGE)
    print(format_growth(table))


if __name__ == "__main__":
    main()
