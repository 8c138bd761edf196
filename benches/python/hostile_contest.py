"""1,000 programs, one in five of them hostile, in 8 sandboxes, of which one is killed every second.

`python -m benches.python.hostile_contest --backend bubblewrap` (or docker, podman: as root, with
programs of `make containers`) judges all programs and compares each verdict with what it must be.
Then it starts the same in a process that gets SIGKILL on the way, `--rounds` times. Each time no
process, container, mount or cgroup may be left. The exit status is 1 if anything is wrong.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from hostile_programs import PROGRAMS  # noqa: E402
from processes import wait_for_end  # noqa: E402
from real_containers import CGROUP, READY_S  # noqa: E402
from real_sandboxes import BACKENDS, POOLS, backend_or_skip, cgroups_left, wait_until  # noqa: E402

from ludic.envs.code_exec.adapters.base import ExactMatchVerifier  # noqa: E402
from ludic.envs.code_exec.docker_sandbox import connect  # noqa: E402
from ludic.envs.code_exec.podman_sandbox import find_podman, run_podman  # noqa: E402
from ludic.envs.code_exec.process_sandbox import IN_SANDBOX  # noqa: E402
from ludic.envs.code_exec.runners import StdinStdoutRunner  # noqa: E402
from ludic.envs.code_exec.types import TestCase  # noqa: E402

ORDINARY = [
    ("print(int(input()) * 2)", True),
    ("print(int(input()) * 3)", False),
    ("x = 1 /", False),
    ("import sys\nfor line in sys.stdin: print(2 * int(line))", True),
]
PATIENCE_S, HOSTILE_S = 60.0, 1.0
"""Processor time of an ordinary and of a hostile program: some only end at their limit."""
TRIES = 100
"""A program whose sandbox was killed, or that hardly got a processor, is judged again."""


def programs(count):
    """(program, whether it passes, its limit of processor time), one in five of them hostile."""
    hostile = itertools.cycle(PROGRAMS)
    for number in range(count):
        code, right = (next(hostile).program, False) if number % 5 == 4 else ORDINARY[number % 5]
        yield f"{code}\n# {number}", right, HOSTILE_S if number % 5 == 4 else PATIENCE_S


async def judge_all(pool, count, workers, *, kill_every_s=None, judged=lambda: None):
    """Judge all, while a sandbox is killed every so often. Returns the counts."""
    counts = {"programs": 0, "wrong": 0, "killed": 0, "judged_again": 0}
    rest = iter(list(programs(count)))

    async def work():
        for code, right, limit_s in rest:
            verdict = await judge(pool, code, limit_s, counts)
            counts["programs"] += 1
            if verdict is not right:
                counts["wrong"] += 1
                print(f"{verdict} instead of {right}:\n{code}", file=sys.stderr)
            judged()

    killer = asyncio.create_task(kill_sandboxes(kill_every_s, counts)) if kill_every_s else None
    try:
        await asyncio.gather(*(work() for _ in range(workers)))
    finally:
        if killer is not None:
            killer.cancel()
    return counts


async def judge(pool, code, limit_s, counts):
    """Whether the program passes its tests, or None if no sandbox could tell."""
    tests = [TestCase("2", "4", metadata={"timeout_s": limit_s}), TestCase("5", "10", metadata={"timeout_s": limit_s})]
    for _ in range(TRIES):
        sandbox = await pool.checkout(timeout_s=600)
        try:
            batch = await StdinStdoutRunner(PATIENCE_S).run_tests(
                sandbox, code, tests, verifier=ExactMatchVerifier(), stop_on_first_failure=True
            )
        finally:
            await pool.release(sandbox)
        if not batch.sandbox_failed:
            return batch.all_passed
        counts["judged_again"] += 1
    return None


async def kill_sandboxes(every_s, counts):
    """SIGKILL to the first process of one of this process's sandboxes, whichever that hits."""
    generator = random.Random(0)
    while True:
        await asyncio.sleep(every_s)
        if first := [pid for pid in own_processes(os.getpid()) if is_first_process(pid)]:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(generator.choice(first), signal.SIGKILL)
                counts["killed"] += 1


def own_processes(run):
    """The processes of sandboxes that descend from `run` or are in its containers."""
    parents, found = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
                if IN_SANDBOX.encode() in (entry / "cmdline").read_bytes():
                    found.append((int(entry.name), f"/{CGROUP}/" in (entry / "cgroup").read_text()))
    return [pid for pid, in_container in found if in_container or run in ancestors(pid, parents)]


def ancestors(pid, parents):
    while pid in parents:
        pid = parents[pid]
        yield pid


def is_first_process(pid):
    """Of a namespace: a sandbox ends with it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    numbers = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
    return len(numbers) > 1 and numbers[-1] == "1"


async def play(backend, count, workers, **settings):
    """Judge all in a pool of the backend, which is there already. Returns the counts."""
    pool = POOLS[backend](workers, max_consecutive_failures=50)
    await pool.start()
    try:
        return await judge_all(pool, count, workers, **settings)
    finally:
        await pool.shutdown()


def kill_run(backend, count, workers, after):
    """Start a run in a process, and kill it when `after` programs are judged. Returns the processes
    that its sandboxes had."""
    command = [sys.executable, "-m", "benches.python.hostile_contest", "--backend", backend, "--as-run"]
    command += ["--programs", str(count), "--workers", str(workers)]
    environment = {**os.environ, "LUDIC_TEST_CGROUP": CGROUP}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT) as run:
        for _ in range(after):
            run.stdout.readline()
        processes = own_processes(run.pid)
        run.kill()
    return processes


def count_left(backend, processes, containers, mounts):
    """What is left, once it has had time to end. A run that is killed between the creation and the
    start of a container leaves it to the next pool (`made_and_left`)."""
    alive = [pid for pid in processes if not wait_for_end(pid)]
    wait_until(lambda: not set(containers()) - not_started(backend))
    made_and_left = len(containers())
    if made_and_left:
        asyncio.run(play(backend, 1, 1))
    wait_until(lambda: not containers() and not cgroups_left() and not mounts_since(mounts))
    rest = {"processes": alive, "containers": containers(), "cgroups": cgroups_left(), "mounts": mounts_since(mounts)}
    return {**{name: len(found) for name, found in rest.items()}, "made_and_left": made_and_left}


def not_started(backend):
    """The names of containers that were created only."""
    if backend == "bubblewrap":
        return set()
    if backend == "podman":
        listed = run_podman([find_podman(), "ps", "--all", "--format", "json"], timeout_s=READY_S)
        return {one["Names"][0] for one in json.loads(listed.stdout or "[]") if one["State"] in ("created", "initialized")}
    client = connect()
    try:
        found = client.containers.list(all=True, filters={"status": "created"}, ignore_removed=True)
        return {one.name for one in found}
    finally:
        client.close()


def mounts_since(before):
    """Without those of other tests."""
    own = f"/ludic-{os.getpid()}-"
    return {line for line in set(Path("/proc/mounts").read_text().splitlines()) - before if "/ludic-" not in line or own in line}


def is_right(counts):
    return not any(counts.get(name) for name in ("wrong", "processes", "containers", "cgroups", "mounts"))


def contests(backend, count, workers, kill_every_s, rounds):
    """The counts of a run to its end, and of `rounds` runs that are killed."""
    with backend_or_skip(backend) as containers:
        mounts = set(Path("/proc/mounts").read_text().splitlines())
        started = time.monotonic()
        counts = asyncio.run(play(backend, count, workers, kill_every_s=kill_every_s))
        seconds = round(time.monotonic() - started, 1)
        rest = count_left(backend, own_processes(os.getpid()), containers, mounts)
        yield {"backend": backend, "run": "to its end", "seconds": seconds, **counts, **rest}
        for number in range(rounds):
            processes = kill_run(backend, count, workers, after=count * (number + 1) // (4 * (rounds + 1)))
            rest = count_left(backend, processes, containers, mounts)
            yield {"backend": backend, "run": "killed", "had_processes": len(processes), **rest}


def say_judged():
    print("judged", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=BACKENDS, default="bubblewrap")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kill-every-s", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5, help="of SIGKILL to the run")
    parser.add_argument("--as-run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends daemons, too
    if options.as_run:
        asyncio.run(play(options.backend, options.programs, options.workers, judged=say_judged))
        return 0
    right = True
    for counts in contests(options.backend, options.programs, options.workers, options.kill_every_s, options.rounds):
        print(json.dumps(counts), flush=True)
        right = right and is_right(counts)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
