"""Kills the processes of `ludic train place.actors=2` with SIGKILL, and compares what the resumed
runs end with.

`python -m benches.python.killed_actors` prints the table of benches/results/reliability.md. The
command, which is the trainer and the supervisor, and its actors get SIGKILL at random moments, some
commands inside a save, one to three times in a run. With `queue.order=exact` each must end with the
weights, losses, gradient norms, rewards and rollouts of the undisturbed run, bit for bit.

All processes are forks of this one (`forked_workers`), so that a start takes no time to import.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benches.python.equal_runs import check_learning, compare_training
from benches.python.forked_lives import (
    LONGEST_LIFE_S,
    has_ended,
    import_all,
    log_of,
    resumable,
    run_ludic,
    start_life,
    wait_for_life,
)
from benches.python.forked_workers import fork_workers
from benches.python.id_reward import write_problems
from benches.python.redis_server import RedisServer, find_redis_server

_NETWORK = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"]
_ACTORS = [
    *("train", "threads=1", "checkpoint.every_n_steps=1", "checkpoint.max_to_keep=2", *_NETWORK, "warmup.steps=2"),
    *("warmup.batch_size=4", "steps=6", "rollout.prompts=4", "rollout.group_size=4", "rollout.log_every=1"),
    *("evaluation.prompts=2", "evaluation.samples_per_prompt=2", "place.actors=2", "queue.order=exact", "queue.lease_s=2"),
]
KINDS: dict[str, list[str]] = {
    "SQLite": _ACTORS,
    "SQLite, ahead": [*_ACTORS, "inference.batches_ahead=1"],
    "Redis, ahead": [*_ACTORS, "inference.batches_ahead=1"],
}
"""Name -> command and settings, without the task and the address of the server."""
VICTIMS = ("command", "command in a save", "actor0", "actor1")
_MOST_LIVES = 8
_POLL_S = 0.0005


@dataclass
class Ended:
    """A run that was killed and resumed to its end."""

    kind: str
    number: int
    kills: list[str] = field(default_factory=list)
    """What was killed, in order."""
    differences: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.killed_actors", description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--runs", type=int, default=50, help="runs of each kind that are killed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import_all()
    folder = Path(tempfile.mkdtemp(prefix="killed-actors-"))
    failed = 0
    print("| queue | runs | command | in a save | an actor | other weights or logs |\n|---|---|---|---|---|---|")
    for kind in options.kinds:
        with _open_queue(kind, folder) as address:
            ended = list(_play_kind(kind, [*KINDS[kind], *write_problems(folder / "rows.jsonl"), *address], folder, options))
        kills = Counter(name.rstrip("01") for one in ended for name in one.kills)
        differ = [one for one in ended if one.differences]
        counts = [kills[name] for name in ("command", "command in a save", "actor")]
        print(f"| {kind} | {len(ended)} | {' | '.join(map(str, counts))} | {len(differ)} |", flush=True)
        for one in differ:
            print(json.dumps(one.__dict__))
        failed += len(differ)
    if failed:
        raise SystemExit(f"{failed} runs differ; their folders are in {folder}")
    shutil.rmtree(folder)


@contextlib.contextmanager
def _open_queue(kind: str, folder: Path) -> Iterator[list[str]]:
    """The settings of the queue's address."""
    if not kind.startswith("Redis"):
        yield []
        return
    program = find_redis_server()
    if program is None:
        raise SystemExit("there is no redis-server; `make redis` fetches one")
    with RedisServer(folder / "redis", program) as server:
        yield [f"queue.url={server.url}"]


def _play_kind(kind: str, arguments: list[str], folder: Path, options: argparse.Namespace) -> Iterator[Ended]:
    parent = folder / kind.replace(", ", "-")  # a comma separates values in a setting
    parent.mkdir()
    whole = parent / "whole"
    begin = time.monotonic()
    if wait_for_life(_start(arguments, whole)) != 0:
        raise SystemExit(f"the undisturbed run failed: see {log_of(whole)}")
    seconds = time.monotonic() - begin
    check_learning(whole)
    for number in range(options.runs):
        rng = random.Random(f"{options.seed} {kind} {number}")
        run = parent / f"run_{number}"
        ended = Ended(kind, number)
        try:
            while not ended.kills:  # else it has ended before the first moment
                shutil.rmtree(run, ignore_errors=True)
                _kill_and_resume(arguments, run, seconds, rng, ended)
            ended.differences += compare_training(run, whole)
        except Exception as error:
            ended.differences.append(repr(error))
        if not ended.differences:
            shutil.rmtree(run)
            log_of(run).unlink()
        yield ended


def _start(arguments: list[str], run: Path) -> int:
    return start_life(resumable(arguments, run), log_of(run), prepare=lambda: fork_workers(run_ludic))


def _kill_and_resume(arguments: list[str], run: Path, seconds: float, rng: random.Random, ended: Ended) -> None:
    """Kill processes of a run at one to three moments, begin it again where its command was killed,
    and bring it to its end. A run that ends before a moment is killed less often."""
    victims = [rng.choice(VICTIMS) for _ in range(rng.randint(1, 3))]
    for _ in range(_MOST_LIVES):
        life = _start(arguments, run)
        while victims:
            victim = victims.pop(0)
            if not _kill(life, victim, run, rng.uniform(0, seconds)):
                break
            ended.kills.append(victim)
            if victim.startswith("command"):
                break
        status = wait_for_life(life)
        if status != -signal.SIGKILL:
            if status != 0:
                raise RuntimeError(f"ended with status {status}: see {log_of(run)}")
            return
    raise RuntimeError(f"not at its end after {_MOST_LIVES} lives: see {log_of(run)}")


def _kill(life: int, victim: str, run: Path, after_s: float) -> bool:
    """Kill after `after_s`; in a save, in the first one after that. False if the run ended
    before."""
    due, deadline = time.monotonic() + after_s, time.monotonic() + LONGEST_LIFE_S
    while time.monotonic() < deadline:
        if has_ended(life):
            return False
        if time.monotonic() >= due and _kill_now(life, victim, run):
            return True
        time.sleep(_POLL_S)
    raise TimeoutError(f"{victim} could not be killed within {LONGEST_LIFE_S:g} s")


def _kill_now(life: int, victim: str, run: Path) -> bool:
    """Kill if there is such a process now."""
    if victim == "command in a save" and not _is_saving(run):
        return False
    if victim.startswith("command"):
        os.kill(life, signal.SIGKILL)
        return True
    pid = _find_actor(run, victim)
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if life in _ancestors(pid):  # another process may have the number of one that has ended
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            os.close(handle)
    return False


def _is_saving(run: Path) -> bool:
    names = (name for _, folders, _ in os.walk(run / "checkpoints") for name in folders)
    return any(name.startswith(".unfinished_step_") for name in names)


def _find_actor(run: Path, name: str) -> int | None:
    """Its process id, if the supervisor says that it runs."""
    try:
        processes = json.loads((run / "launch.json").read_text())["processes"]
    except FileNotFoundError:
        return None
    return next((process["pid"] for process in processes if process["name"] == name and process["state"] == "running"), None)


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            return
        yield pid


if __name__ == "__main__":
    main()
