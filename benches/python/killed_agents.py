"""Kills runs of an agent with SIGKILL at random moments, resumes them, and compares what they end
with.

`python -m benches.python.killed_agents` trains `errand` for 6 steps with a checkpoint after each.
A run that was killed must have the problems and seeds of the uninterrupted one, each episode and
each step once. Which calls share a batch of the sampler depends on the timing of the agent, and the
last digits of log-probabilities on the batch: so the answers are counted, and not compared as a
whole.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TRAIN = [sys.executable, "-m", "ludic.cli", "train"]
WARM = ["errand", "threads=1", "evaluation.prompts=2", "evaluation.samples_per_prompt=1"]
SMALL = [*WARM, "warmup.steps=0", "steps=6", "rollout.prompts=2", "rollout.log_every=1", "checkpoint.every_n_steps=1"]
LONGEST_S = 900.0


class Ended(NamedTuple):
    """What a run has written."""

    episodes: list[tuple[Any, ...]]
    """Index, problem and seed of each."""
    calls: list[list[list[int]]]
    """The sampled ids of each call of each episode."""
    steps: list[int]
    status: str


def read(run: Path) -> Ended:
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    metas = [rollout["meta"] for rollout in rollouts]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Ended(
        [(meta["episode_idx"], meta["problem_id"], meta["engine"]["sampling_seed"]) for meta in metas],
        [[step["trace"]["completion_token_ids"] for step in rollout["steps"]] for rollout in rollouts],
        [line["step"] for line in metrics if line["phase"] == "reinforce"],
        json.loads((run / "summary.json").read_text())["status"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.killed_agents", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    draw, folder = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="killed-agents-"))
    run_to_end(folder, [*WARM, "steps=1", "name=warm"])
    begun = time.monotonic()
    given = [*SMALL, f"model={folder}/runs/warm"]
    run_to_end(folder, [*given, "name=whole"])
    seconds, whole = time.monotonic() - begun, read(folder / "runs" / "whole")
    same = calls = sound = 0
    for number in range(options.runs):
        run, first = folder / "runs" / f"run{number}", [*given, f"name=run{number}"]
        after = draw.uniform(0.1, 1.0) * seconds
        killed = kill_after(after, folder, first)
        run_to_end(folder, ["--resume", str(run)] if (run / "config.yaml").exists() else first)
        ended = read(run)
        is_sound = (ended.episodes, ended.steps, ended.status) == (whole.episodes, whole.steps, whole.status)
        pairs = [pair for ours, theirs in zip(ended.calls, whole.calls, strict=True) for pair in zip(ours, theirs, strict=False)]
        equal = sum(one == other for one, other in pairs)
        of = sum(map(len, whole.calls))
        same, calls, sound = same + equal, calls + of, sound + is_sound
        when = f"killed after {after:.1f} s" if killed else "ended before it was killed"
        print(
            f"{number}: {when}; {'the same problems, each once' if is_sound else 'DIFFERENT'}; {equal} of {of} answers equal",
            flush=True,
        )
    print(f"{sound} of {options.runs} runs have each problem and each step once; {same / calls:.4%} of {calls} answers are equal")
    sys.exit(sound != options.runs)


def run_to_end(folder: Path, arguments: Sequence[str]) -> None:
    subprocess.run([*TRAIN, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=LONGEST_S)


def kill_after(seconds: float, folder: Path, arguments: Sequence[str]) -> bool:
    """Start a run, and kill it with SIGKILL after so long. Returns False if it ended before."""
    running = subprocess.Popen([*TRAIN, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        running.wait(seconds)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGKILL)
        running.wait()
        return True
    return False


if __name__ == "__main__":
    main()
