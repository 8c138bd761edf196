"""A trainer and actors as processes over one SQLite file, killed with SIGKILL at random moments.

    python tests/support/queue_kills.py exact --steps 60 --kills 50 --seed 0 [--wipe 5]

prints one line of JSON: how many groups were lost and doubled, how many steps were done again and
came out otherwise, and whether the final weights are those of an undisturbed run. Weights and
samples are hashes (`queue_runs`); the file, the processes and the kills are real. Nothing here
imports torch, and children are forked from one process that has imported everything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from queue_runs import Plan, batch_of, digest, sample, simulate

from ludic.files.atomic import write_json
from ludic.training.queue.actor import run_actor
from ludic.training.queue.base import Work
from ludic.training.queue.opening import open_log
from ludic.training.queue.source import QueueBatchSource
from ludic.types import Rollout

PER_BATCH, AHEAD, EVERY, LEASE_S, DEADLINE_S = 4, 2, 5, 1.0, 500.0


async def train(folder: Path, order: str, steps: int) -> None:
    log, checkpoint = open_log(folder, name="r"), folder / "checkpoint.json"
    source = QueueBatchSource(
        log,
        run="r",
        groups_per_batch=PER_BATCH,
        to_batch=batch_of,
        ahead=AHEAD,
        order=order,  # type: ignore[arg-type]
        num_batches=steps,
        max_attempts=10**6,  # each kill of an actor is an attempt
    )
    step, weights = 0, digest()
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        step, weights = saved["step"], saved["weights"]
        source.load_state_dict(saved["source"])
        await source.announce(step)
    while step < steps:
        batch = await source.next_batch()
        weights = digest(weights, batch.meta["numbers"], batch.meta["digest"])
        step += 1
        with (folder / "journal").open("a") as journal:
            journal.write(json.dumps([step, batch.meta["numbers"], weights]) + "\n")
        await source.announce(step)
        if step % EVERY == 0 or step == steps:
            write_json(checkpoint, {"step": step, "weights": weights, "source": source.state_dict()})
            await source.checkpoint_saved()
    await source.close_queue()


async def act(folder: Path, order: str) -> None:
    rng = random.Random(os.getpid())

    async def play(work: Work) -> list[Rollout]:
        await asyncio.sleep(rng.uniform(0.002, 0.03))
        return sample(work)

    async def weights(version: int) -> None:
        pass

    log = open_log(folder, name="r")
    await run_actor(
        log,
        play=play,
        weights=weights,
        actor=f"a-{os.getpid()}",
        order=order,  # type: ignore[arg-type]
        lease_s=LEASE_S,
        max_attempts=10**6,
    )


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def run_with_kills(order: str, steps: int, kills: int, seed: int, wipes: int = 0) -> dict[str, object]:
    """Run to the end; of `kills` kills, every `kills / wipes`-th also deletes the queue's file."""
    folder, rng, started = Path(tempfile.mkdtemp(prefix="ludic-kills-")), random.Random(seed), time.monotonic()
    starts = {
        "trainer": lambda: asyncio.run(train(folder, order, steps)),
        **{f"actor{i}": lambda: asyncio.run(act(folder, order)) for i in range(2)},
    }
    running = {name: fork(start) for name, start in starts.items()}
    killed, errors, next_kill = 0, 0, time.monotonic() + 0.3
    try:
        while "trainer" in running and time.monotonic() - started < DEADLINE_S:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                name = next(name for name, each in running.items() if each == pid)
                del running[name]
                if status:
                    errors += 1
                    running[name] = fork(starts[name])
            elif killed < kills and time.monotonic() > next_kill:
                name = rng.choice(["trainer", *running])
                os.kill(running[name], signal.SIGKILL)
                os.waitpid(running[name], 0)
                killed += 1
                if wipes and killed % max(1, kills // wipes) == 0:
                    for path in folder.glob("queue.sqlite*"):
                        path.unlink(missing_ok=True)
                running[name] = fork(starts[name])
                next_kill = time.monotonic() + rng.uniform(0.05, 0.5)
            else:
                time.sleep(0.005)
        return {"order": order, "kills": killed, "wipes": wipes, "errors": errors, **count(folder, order, steps)}
    finally:
        for pid in running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def count(folder: Path, order: str, steps: int) -> dict[str, object]:
    """What the journal says. A step that was done again counts as it was done last."""
    done: dict[int, tuple[list[int], str]] = {}
    redone = otherwise = 0
    for line in (folder / "journal").read_text().splitlines():
        step, numbers, weights = json.loads(line)
        if step in done:
            redone += 1
            otherwise += done[step] != (numbers, weights)
        done[step] = (numbers, weights)
    trained = [number for numbers, _ in done.values() for number in numbers]
    undisturbed = simulate(Plan(order=order, steps=steps, groups_per_batch=PER_BATCH, ahead=AHEAD)).weights
    return {
        "groups": steps * PER_BATCH,
        "lost": len(set(range(steps * PER_BATCH)) - set(trained)),
        "doubled": len(trained) - len(set(trained)),
        "redone": redone,
        "redone_otherwise": otherwise,
        "equals_undisturbed": done[steps][1] == undisturbed if order == "exact" and steps in done else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("order", choices=["exact", "arrival"])
    for name, default in (("steps", 60), ("kills", 50), ("seed", 0), ("wipes", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(json.dumps(run_with_kills(given.order, given.steps, given.kills, given.seed, given.wipes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
