"""Kills the processes of a run at random moments, and counts what was lost or trained twice: the
tables of benches/results/reliability.md.

    python -m benches.python.faults                  # exact order on Redis: 60 kills in 60 s
    python -m benches.python.faults --queue sqlite --protocol arrival
    python -m benches.python.faults --protocol samples --wipes 0 --fsync always
    python -m benches.python.faults --kills 0        # the undisturbed run

One trainer, three actors and, with `--queue redis`, a server of Redis. Each second one of them gets
SIGKILL and is started again, the trainer from its last checkpoint. At `--wipes` of these moments
all data of the queue are deleted too. Prints one line of JSON, and exits with 1 if anything was
lost, trained twice or divided, if a redone step differs, or if the run does not end.

    lost          groups that the history of the final weights neither has nor gave up
    doubled       groups that it has twice
    split         groups whose members are not all in one step
    redone, differ   steps that a restarted trainer did again; those that were then another step
    equal         whether the weights at the end are those of an undisturbed run (order exact)
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from benches.python import fault_roles
from benches.python.fault_roles import MEMBERS, Plan, undisturbed_weights
from benches.python.redis_server import RedisServer, find_redis_server

ACTORS = 3
STUCK_S = 60.0
"""A run whose trainer does no step for so long has failed."""
END_S = 20.0
"""Actors must end so soon after the trainer."""
_PARENT_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)

Result = dict[str, Any]


class Run:
    """The processes of one run. They are forked from this one, which has imported everything."""

    def __init__(self, plan: Plan, server: RedisServer | None, seed: int) -> None:
        self.plan, self.server, self.rng = plan, server, random.Random(seed)
        self.trainer = fault_roles.consume if plan.protocol == "samples" else fault_roles.train
        self.actor = fault_roles.produce if plan.protocol == "samples" else fault_roles.act
        self.pids: dict[str, int] = {}
        self.kills: Counter[str] = Counter()
        self.wipes = self.died = 0
        self._progress = (0, time.monotonic())

    def start(self, name: str) -> None:
        if name == "server":
            assert self.server is not None
            self.server.start()
        else:
            self.pids[name] = _fork(self.trainer if name == "trainer" else self.actor, self.plan, name)

    def disturb(self, kills: int, wipes: int, every_s: float) -> bool:
        """Start all, kill one of them every `every_s` seconds until `kills` are done, and wait for
        the trainer. Returns whether it reached its end."""
        names = ["trainer", *(f"actor{number}" for number in range(ACTORS))]
        for name in names:
            self.start(name)
        targets = [*names, *(["server"] if self.server is not None else [])]
        wiped = set(self.rng.sample(range(kills), wipes))
        next_kill = time.monotonic() + self.rng.uniform(0.5, 1.5) * every_s
        while not self._trainer_is_done():
            if sum(self.kills.values()) < kills and time.monotonic() >= next_kill:
                self._kill(self.rng.choice(targets), wipe=sum(self.kills.values()) in wiped)
                next_kill = time.monotonic() + self.rng.uniform(0.5, 1.5) * every_s
            if self._is_stuck():
                return False
            time.sleep(0.005)
        return True

    def _kill(self, name: str, *, wipe: bool) -> None:
        if wipe and self.server is not None:
            name = "server"
        if name == "server":
            assert self.server is not None
            self.server.kill()
        else:
            os.kill(self.pids[name], signal.SIGKILL)
            os.waitpid(self.pids.pop(name), 0)
        self.kills[name.rstrip("0123456789")] += 1
        self.plan.append("kills", [name, wipe, time.time()])
        if wipe:
            self.wipes += 1
            if self.server is not None:
                self.server.wipe()
            else:
                for path in self.plan.folder.glob("queue.sqlite*"):
                    path.unlink()
        time.sleep(self.rng.uniform(0.0, 0.1))
        self.start(name)

    def _trainer_is_done(self) -> bool:
        """Whether the trainer has ended well. A process that ended otherwise is started again, and
        counted: nothing may die by itself."""
        for name, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[name]
                if name == "trainer" and status == 0:
                    return True
                if status != 0:
                    self.died += 1
                    self.start(name)
        return False

    def _is_stuck(self) -> bool:
        path = self.plan.folder / "journal"
        size = path.stat().st_size if path.exists() else 0
        if size != self._progress[0]:
            self._progress = (size, time.monotonic())
        return time.monotonic() - self._progress[1] > STUCK_S

    def end(self) -> int:
        """Wait until the actors have ended by themselves, and kill the others. Returns how many
        those were; with samples, actors go on until they are killed."""
        deadline = time.monotonic() + (0.0 if self.plan.protocol == "samples" else END_S)
        while self.pids and time.monotonic() < deadline:
            for name, pid in list(self.pids.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self.pids[name]
            time.sleep(0.01)
        left = len(self.pids)
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids.clear()
        return left


def _fork(role: Callable[[Plan], Coroutine[Any, Any, None]], plan: Plan, name: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PARENT_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        random.seed(os.getpid())
        output = os.open(plan.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        asyncio.run(role(plan))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def count_faults(plan: Plan) -> Result:
    """Read the journal and compare it with what must have happened. Of a step that was done again,
    the last line belongs to the history of the final weights."""
    history: dict[int, Any] = {}
    redone = differ = 0
    duplicates = 0
    for step, groups, weights, facts in plan.read("journal"):
        if step in history:
            redone += 1
            differ += history[step] != (groups, weights)
        history[step] = (groups, weights)
        duplicates = max(duplicates, facts["queue/duplicates"])
    groups = [group for step in sorted(history) for group in history[step][0]]
    numbers = [number for number, _ in groups]
    expected = _acknowledged(plan) if plan.protocol == "samples" else set(range(plan.steps * fault_roles.GROUPS_PER_BATCH))
    final = history[max(history)][1] if history else ""
    return {
        "steps": len(history),
        "groups": len(numbers),
        "lost": len(expected - set(numbers)),
        "doubled": len(numbers) - len(set(numbers)),
        "split": sum(len(members) not in (0, MEMBERS) for _, members in groups),
        "given_up": sum(not members for _, members in groups),
        "redone": redone,
        "differ": differ,
        "refused": duplicates,
        "equal": final == undisturbed_weights(plan.steps) if plan.protocol == "exact" else None,
    }


def _acknowledged(plan: Plan) -> set[str]:
    """The groups whose sending was acknowledged, except those that are still in the queue."""
    return {group for group, _ in plan.read("acknowledged")} - set(plan.read("untrained"))


def run_faults(
    folder: Path,
    *,
    queue: str = "redis",
    protocol: str = "exact",
    kills: int = 60,
    wipes: int = 1,
    seconds: float = 60.0,
    seed: int = 0,
    fsync: str = "everysec",
) -> Result:
    """One run in `folder`, which must be empty; its result has the counts."""
    program = find_redis_server() if queue == "redis" else None
    if queue == "redis" and program is None:
        raise SystemExit("no redis-server: `make redis` fetches one")
    server = RedisServer(folder / "redis", program, appendfsync=fsync) if program is not None else None
    steps = int(seconds * (24 if protocol == "samples" else 18))  # somewhat more than it does in this time
    plan = Plan(folder, None if server is None else server.url, protocol, steps, step_s=0.05)
    run = Run(plan, server, seed)
    started, done = time.monotonic(), False
    try:
        if server is not None:
            server.start()
        done = run.disturb(kills, wipes, seconds / max(kills, 1))
    finally:
        left = run.end()
        if done and protocol == "samples":
            fault_roles.note_untrained(plan)
        if server is not None:
            server.kill()
    killed = sum(run.kills.values())
    result = {
        "queue": queue,
        "fsync": None if server is None else fsync,
        "protocol": protocol,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "kills": killed,
        "killed": dict(run.kills),
        "wipes": run.wipes,
        "died_by_itself": run.died,
        "ended": done,
        "actors_ended": left == 0 if protocol != "samples" else None,
        **count_faults(plan),
    }
    return {**result, "ok": _is_right(result)}


def _is_right(result: Result) -> bool:
    """Where data were deleted, `samples` may lose what was in the queue, and a step that is done
    again in order `arrival` may be another one."""
    counts = [result["doubled"], result["split"], result["died_by_itself"]]
    if result["protocol"] != "samples" or not result["wipes"]:
        counts.append(result["lost"])
    if result["protocol"] == "exact" or not result["wipes"]:
        counts.append(result["differ"])
    return result["ended"] and not any(counts) and result["equal"] in (True, None) and result["actors_ended"] in (True, None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--queue", choices=["redis", "sqlite"], default="redis")
    parser.add_argument("--protocol", choices=["exact", "arrival", "samples"], default="exact")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--wipes", type=int, default=1, help="at how many of the kills the queue's data are deleted")
    parser.add_argument("--seconds", type=float, default=60.0, help="the time in which to kill; the run takes somewhat longer")
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 0], metavar=("FIRST", "LAST"))
    parser.add_argument("--fsync", choices=["everysec", "always"], default="everysec", help="appendfsync of the server")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and journal")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    right = True
    for seed in range(options.seeds[0], options.seeds[1] + 1):
        folder = Path(tempfile.mkdtemp(prefix="ludic-faults-"))
        try:
            result = run_faults(
                folder,
                queue=options.queue,
                protocol=options.protocol,
                kills=options.kills,
                wipes=min(options.wipes, options.kills),
                seconds=options.seconds,
                seed=seed,
                fsync=options.fsync,
            )
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
        if options.keep:
            print(folder, file=sys.stderr)
        print(json.dumps(result), flush=True)
        right &= result["ok"]
    sys.exit(not right)


if __name__ == "__main__":
    main()
