"""What the built-in recipes learn, per seed: the tables of benches/results/tasks.md and
docs/games.md.

    python benches/python/learning.py sort --algorithm grpo --seeds 50 54
    python benches/python/learning.py addition --seeds 60 64 threads=1
    python benches/python/learning.py tictactoe --seeds 60 64
    python benches/python/learning.py tools --seeds 60 64
    python benches/python/learning.py code --seeds 70 74
    python benches/python/learning.py tictactoe --algorithm ppo --show critic/explained_variance

`--show` adds the mean of a metric over the last `LAST` steps. Each run is a process of its own;
settings (`key=value`) are passed on to it. Runs follow one another. Seconds are the wall time and
the CPU time of the whole process, imports included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

LAST = 10


def run(recipe: str, algorithm: str, seed: int, settings: list[str], output: str) -> dict[str, Any]:
    """Run one seed. Returns its summary with its wall and CPU seconds."""
    command = [sys.executable, "-m", "ludic.cli", "train", recipe, "--algorithm", algorithm, "--json"]
    cpu_before, started = _cpu_seconds(), time.perf_counter()
    finished = subprocess.run(
        [*command, f"seed={seed}", f"output={output}", *settings], stdout=subprocess.PIPE, text=True, check=True
    )
    summary: dict[str, Any] = json.loads(finished.stdout)
    metrics = next(Path(output).glob("*/metrics.jsonl"))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {**summary, "lines": lines, "process_s": time.perf_counter() - started, "cpu_s": _cpu_seconds() - cpu_before}


Rates = dict[str, float]
Column = tuple[str, Callable[[Rates, Rates], str]]
"""The heading of a column, and its cell from the rates before and after training."""


def _before_and_after(name: str) -> Callable[[Rates, Rates], str]:
    return lambda before, after: f"{before[name]:.3f} -> {after[name]:.3f}"


def _after(*names: str) -> Callable[[Rates, Rates], str]:
    return lambda before, after: " / ".join(f"{after[name]:.3f}" for name in names)


def _pair(rates: Rates) -> str:
    return f"{rates['sampled_reward']:.3f} / {rates['greedy_accuracy']:.3f}"


PLAIN: list[Column] = [
    ("before: sampled / greedy", lambda before, after: _pair(before)),
    ("after: sampled / greedy", lambda before, after: _pair(after)),
]
COLUMNS: dict[str, list[Column]] = {
    "code": [*PLAIN, ("shown test passed", _before_and_after("shown_passed"))],
    "addition": [*PLAIN, ("scratchpad right", _before_and_after("scratchpad_right"))],
    "tools": [*PLAIN, ("both keys looked up", _before_and_after("looked_up"))],
    "tictactoe": [
        ("won or drawn, random opponent", _before_and_after("not_lost")),
        ("greedy", _before_and_after("greedy_accuracy")),
        ("after: as X / O", _after("not_lost_as_x", "not_lost_as_o")),
        ("after: won", _after("won")),
        ("legal moves", _before_and_after("legal_moves")),
        ("drawn, perfect opponent", _before_and_after("perfect_drawn")),
        ("after: as X / O", _after("perfect_drawn_as_x", "perfect_drawn_as_o")),
    ],
}


def format_row(summary: dict[str, Any], columns: list[Column], shown: list[str]) -> str:
    """One row of the table."""
    clip = summary["clip_fraction"]
    values = [[line[name] for line in summary["lines"] if name in line][-LAST:] for name in shown]
    cells = [
        str(summary["seed"]),
        *(cell(summary["before"], summary["after"]) for _, cell in columns),
        *(f"{fmean(each):.3f}" if each else "-" for each in values),
        "-" if clip is None else f"{clip:.4f}",
        f"{summary['process_s']:.0f} / {summary['cpu_s']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(50, 54))
    parser.add_argument("--show", nargs="+", default=[], metavar="METRIC")
    options, settings = parser.parse_known_args()
    columns = COLUMNS.get(options.recipe, PLAIN)
    head = ["seed", *(name for name, _ in columns), *options.show, "clip fraction", "seconds: wall / CPU"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for seed in range(options.seeds[0], options.seeds[1] + 1):
        with tempfile.TemporaryDirectory() as output:
            summary = run(options.recipe, options.algorithm, seed, settings, output)
        print(format_row(summary, columns, options.show), flush=True)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
