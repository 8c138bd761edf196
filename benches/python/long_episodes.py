"""Memory of episodes whose calls continue each other, from their token traces to the table of the
core. Each process plays nothing else: `python -m benches.python.long_episodes --episodes 64`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from ludic.columns import append_ids, int_column
from ludic.training import ConstantCredit
from ludic.training.batching.token_columns import table_of_items
from ludic.training.rollouts.to_samples import batch_from_rollouts
from ludic.types import Rollout, Step, TokenTrace


def resident_mb() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def make_episode(seed: int, calls: int, tokens: int) -> Rollout:
    """Calls that share out `tokens` tokens; the last third of each call is sampled."""
    ids = np.random.default_rng(seed).integers(5, 4000, tokens, dtype=np.int32)
    steps, read, sampled = [], int_column([]), tokens // calls // 3
    for call in range(calls):
        end = tokens * (call + 1) // calls
        read = append_ids(read, ids[len(read) : end])
        trace = TokenTrace.from_arrays(read[: end - sampled], read[end - sampled :], [-0.5] * sampled, "stop")
        steps.append(Step(call, "", "", None, 0.0, False, call == calls - 1, {}, trace))
    return Rollout(steps=steps)


def measure(episodes: int, calls: int, tokens: int) -> None:
    """Print the megabytes and the processor seconds."""
    batch_from_rollouts([make_episode(0, 2, 30)], ConstantCredit())  # loads what it needs
    sizes, times = [resident_mb()], [time.process_time()]
    rollouts = [make_episode(seed, calls, tokens) for seed in range(episodes)]
    sizes.append(resident_mb())
    batch = batch_from_rollouts(rollouts, ConstantCredit())
    sizes.append(resident_mb())
    times.append(time.process_time())
    table = table_of_items(batch.items)
    sizes.append(resident_mb())
    times.append(time.process_time())
    traces, samples, columns = np.diff(sizes)
    distinct = episodes * tokens
    print(
        f"{episodes} episodes of {calls} calls, {tokens} distinct tokens each, {table.num_tokens / distinct:.1f} times as many read: "
        f"traces {traces:.1f} MB, samples {samples:.1f}, table {columns:.1f}; {(sizes[-1] - sizes[0]) * 2**20 / distinct:.1f} bytes "
        f"a distinct token; table made in {times[2] - times[1]:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=30_000)
    measure(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
