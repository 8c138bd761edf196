"""Kills one of two ranks with SIGKILL, again and again in one run, and compares what it ends with.

`python -m benches.python.killed_ranks` prints the table of benches/results/reliability.md. This
process stands for torchrun's agent, and the ranks are forks of it: when one is killed, the other
gets SIGTERM, SIGKILL after 30 s, and both are started again with the same command. They resume the
run from its newest checkpoint. It must end as the undisturbed one of two ranks does, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benches.python.equal_runs import check_learning, compare
from benches.python.forked_lives import LONGEST_LIFE_S, has_ended, import_all, log_of, start_life, wait_for_life
from benches.python.id_reward import write_problems

WORLD_SIZE = 2
_NETWORK = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"]
_TINY = ["threads=1", "checkpoint.every_n_steps=1", "checkpoint.max_to_keep=2", *_NETWORK]
KINDS: dict[str, list[str]] = {
    "GRPO": [
        *("train", *_TINY, "warmup.steps=1", "rollout.prompts=2", "rollout.group_size=4", "rollout.log_every=1"),
        *("evaluation.prompts=2", "evaluation.samples_per_prompt=2"),
    ],
    "SFT": ["sft", *_TINY, "rows=32", "batch_size=4", "heldout=0.1"],
}
"""Name -> command and settings, without the task and the number of steps."""
_POLL_S = 0.001
_PATIENCE_S = 30.0
"""How long torchrun's agent waits between SIGTERM and SIGKILL."""


@dataclass
class Ended:
    """A run that was killed many times."""

    kills: Counter[str] = field(default_factory=Counter)
    """Of each rank."""
    checkpoints: set[int] = field(default_factory=set)
    """The steps of the newest checkpoints that kills left; 0 is none."""
    longest_s: float = 0.0
    """How long it took until the other rank had ended, at most."""
    not_in_time: int = 0
    """How often it had to be killed."""
    differences: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.killed_ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=160, help="steps of a run, of which a kill lets it do 1 to 2 at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import_all()
    folder = Path(tempfile.mkdtemp(prefix="killed-ranks-"))
    failed = False
    print(
        "| run | kills of rank 0, rank 1 | checkpoints resumed from | other rank's end, longest; killed | other weights or logs |"
    )
    print("|---|---|---|---|---|")
    for kind in options.kinds:
        ended = _play(kind, [*KINDS[kind], *_last_settings(kind, options.steps, folder)], folder / kind, options)
        ranks = ", ".join(str(ended.kills[f"rank {rank}"]) for rank in range(WORLD_SIZE))
        differ = "; ".join(ended.differences) or "0"
        print(
            f"| {kind} | {ranks} | {len(ended.checkpoints)} | {ended.longest_s:.1f} s; {ended.not_in_time} | {differ} |",
            flush=True,
        )
        failed |= bool(ended.differences)
    if failed:
        raise SystemExit(f"runs differ; their folders are in {folder}")
    shutil.rmtree(folder)


def _last_settings(kind: str, steps: int, folder: Path) -> list[str]:
    """The task and the number of steps."""
    problems = [] if kind == "SFT" else write_problems(folder / "rows.jsonl")
    return [*problems, f"steps={steps}"]


def _play(kind: str, arguments: list[str], folder: Path, options: argparse.Namespace) -> Ended:
    folder.mkdir()
    whole, run = folder / "whole", folder / "run"
    begin = time.monotonic()
    statuses = [wait_for_life(pid) for pid in _start_ranks(arguments, whole, 0)]
    if any(statuses):
        raise SystemExit(f"the undisturbed run of {kind} ended with {statuses}: see {log_of(whole)}")
    check_learning(whole)
    step_s = _measure_step(whole, options.steps)
    start_s = time.monotonic() - begin - step_s * options.steps
    ended, rng = Ended(), random.Random(f"{options.seed} {kind}")
    try:
        for life in range(options.kills):
            ranks = _start_ranks(arguments, run, life)
            steps = None if rng.random() < 0.5 else rng.randint(1, 2)
            _kill(ranks, run, rng.randrange(WORLD_SIZE), steps, rng.uniform(0, step_s if steps else start_s), ended)
        statuses = [wait_for_life(pid) for pid in _start_ranks(arguments, run, options.kills)]
        if any(statuses):
            raise RuntimeError(f"the last life ended with {statuses}")
        ended.differences += compare(run, whole)
    except Exception as error:
        ended.differences.append(f"{error!r}: see {log_of(run)}")
    return ended


def _start_ranks(arguments: list[str], run: Path, restarts: int) -> list[int]:
    """Start all ranks with the same command, as torchrun's agent does: it is their parent, and says
    how often it has started them again. Returns their process ids."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [*arguments, f"output={run.parent}", f"name={run.name}"]
    common = {"WORLD_SIZE": WORLD_SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": run.name}
    variables = {**common, "TORCHELASTIC_RESTART_COUNT": restarts}

    def prepare(rank: int) -> None:
        os.environ |= {name: str(value) for name, value in {**variables, "RANK": rank, "LOCAL_RANK": rank}.items()}

    return [start_life(command, log_of(run), prepare=partial(prepare, rank)) for rank in range(WORLD_SIZE)]


def _kill(ranks: list[int], run: Path, victim: int, steps: int | None, after_s: float, ended: Ended) -> None:
    """Kill a rank `after_s` after the start, or after so many new steps, and end the other."""
    wanted = None if steps is None else _newest_checkpoint(run) + steps
    deadline = time.monotonic() + LONGEST_LIFE_S
    while wanted is not None and _newest_checkpoint(run) < wanted and not any(map(has_ended, ranks)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {wanted} was not reached")
        time.sleep(_POLL_S)
    time.sleep(after_s)
    if has_ended(ranks[victim]):
        raise RuntimeError(f"rank {victim} ended before it was killed")
    os.kill(ranks[victim], signal.SIGKILL)
    begin = time.monotonic()
    wait_for_life(ranks[victim])
    (other,) = set(ranks) - {ranks[victim]}
    os.kill(other, signal.SIGTERM)
    if wait_for_life(other, _PATIENCE_S) == -signal.SIGKILL:
        ended.not_in_time += 1
    ended.longest_s = max(ended.longest_s, time.monotonic() - begin)
    ended.kills[f"rank {victim}"] += 1
    ended.checkpoints.add(_newest_checkpoint(run))


def _newest_checkpoint(run: Path) -> int:
    """Its step; 0 if there is none."""
    names = (name for _, folders, _ in os.walk(run / "checkpoints") for name in folders)
    return max((int(name.removeprefix("step_")) for name in names if name.startswith("step_")), default=0)


def _measure_step(whole: Path, steps: int) -> float:
    """Seconds of a step, roughly."""
    return ((whole / "metrics.jsonl").stat().st_mtime - (whole / "config.yaml").stat().st_mtime) / steps


if __name__ == "__main__":
    main()
