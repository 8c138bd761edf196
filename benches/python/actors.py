"""Actors against one process: the throughput and the age of samples of `ludic train`.

    python benches/python/actors.py --steps 60 sort threads=1

Each row is a run in a folder of its own, one after the other; settings (`key=value`) are passed on
to all of them. Seconds are medians over the steps after the first `SKIPPED`, while actors start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = {
    "one process": [],
    "one process, a batch ahead": ["inference.batches_ahead=1"],
    "1 actor": ["place.actors=1"],
    "1 actor, a batch ahead": ["place.actors=1", "inference.batches_ahead=1"],
    "2 actors": ["place.actors=2"],
    "2 actors, a batch ahead": ["place.actors=2", "inference.batches_ahead=1"],
    "2 actors, two batches ahead": ["place.actors=2", "inference.batches_ahead=2"],
    "2 actors, by arrival": ["place.actors=2", "inference.batches_ahead=1", "queue.order=arrival"],
}
SKIPPED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", help="a recipe and settings of `ludic train`")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    print("| run | answers/s | s a step | waiting for samples | versions old, mean / most | reward at the end |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in options.rows:
        with tempfile.TemporaryDirectory() as output:
            print(
                _measure(
                    name,
                    [*options.settings, *ROWS[name], f"steps={options.steps}", f"output={output}", "name=run"],
                    Path(output) / "run",
                ),
                flush=True,
            )


def _measure(name: str, settings: list[str], run: Path) -> str:
    """One row of the table."""
    subprocess.run([sys.executable, "-m", "ludic.cli", "train", *settings, "--json"], stdout=subprocess.PIPE, check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "reinforce" and "perf/step_s" in line][SKIPPED:]
    seconds = statistics.median(line["perf/step_s"] for line in steps)
    answers = statistics.median(line["train/played_rollouts"] for line in steps)
    waited = sum(line["perf/rollout_s"] for line in steps) / sum(line["perf/step_s"] for line in steps)
    lags = [line.get("train/policy_lag", 0.0) for line in steps]
    reward = statistics.mean(line["train/avg_sampled_reward"] for line in steps[-10:])
    lag = f"{statistics.mean(lags):.2f} / {max(lags):.2f}"
    return f"| {name} | {answers / seconds:,.0f} | {seconds:.3f} | {waited:.0%} | {lag} | {reward:.3f} |"


if __name__ == "__main__":
    main()
