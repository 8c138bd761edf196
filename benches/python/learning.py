"""What the built-in recipes learn, seed by seed: the tables of docs/results.md.

    python benches/python/learning.py sort --algorithm grpo --seeds 50 54
    python benches/python/learning.py addition --seeds 60 64 threads=1

Each run is a process of its own, one after another, with the settings that follow (`key=value`) passed on. Seconds are wall time of the
whole process, imports included, and its CPU time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any


def run(recipe: str, algorithm: str, seed: int, settings: list[str], output: str) -> dict[str, Any]:
    """The summary of one run, with its wall and CPU seconds."""
    command = [sys.executable, "-m", "ludic.cli", "train", recipe, "--algorithm", algorithm, "--json"]
    used, started = _cpu_seconds(), time.perf_counter()
    finished = subprocess.run(
        [*command, f"seed={seed}", f"output={output}", *settings], stdout=subprocess.PIPE, text=True, check=True
    )
    summary: dict[str, Any] = json.loads(finished.stdout)
    return {**summary, "process_s": time.perf_counter() - started, "cpu_s": _cpu_seconds() - used}


def row(summary: dict[str, Any]) -> str:
    """A line of the table."""
    before, after, clip = summary["before"], summary["after"], summary["clip_fraction"]
    cells = [
        str(summary["seed"]),
        f"{before['sampled_reward']:.3f} / {before['greedy_accuracy']:.3f}",
        f"{after['sampled_reward']:.3f} / {after['greedy_accuracy']:.3f}",
        *([f"{before['scratchpad_right']:.3f} -> {after['scratchpad_right']:.3f}"] if "scratchpad_right" in before else []),
        "-" if clip is None else f"{clip:.4f}",
        f"{summary['process_s']:.0f} / {summary['cpu_s']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(50, 54))
    options, settings = parser.parse_known_args()
    scratchpad = ["scratchpad right"] if options.recipe == "addition" else []
    head = ["seed", "before: sampled / greedy", "after: sampled / greedy", *scratchpad, "clip fraction", "seconds: wall / CPU"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    with tempfile.TemporaryDirectory() as output:
        for seed in range(options.seeds[0], options.seeds[1] + 1):
            print(row(run(options.recipe, options.algorithm, seed, settings, output)), flush=True)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
