"""Pools of real sandboxes for tests, which check that nothing is left of them.

A bubblewrap that is not on PATH is taken from target/bubblewrap (`make bubblewrap` fetches it),
Docker and Podman from target/containers (`make containers`).
"""

import asyncio
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import wait_for_end
from real_containers import cgroups, changed_environment, docker_daemon, docker_pool, own_podman, podman_pool

from ludic.envs.code_exec.bubblewrap import BubblewrapSandboxPool

FETCHED = Path(__file__).parents[2] / "target" / "bubblewrap"
POOLS = {"bubblewrap": BubblewrapSandboxPool, "docker": docker_pool, "podman": podman_pool}
BACKENDS = list(POOLS)
GONE_S = 60


@contextmanager
def backend_or_skip(backend):
    """What this backend's pools need is there. Gives the list of its containers."""
    if backend == "docker":
        with docker_daemon() as client:
            yield lambda: [one.name for one in client.containers.list(all=True, ignore_removed=True)]
    elif backend == "podman":
        with own_podman() as podman:
            listing = [podman, "ps", "--all", "--format", "{{.Names}}"]
            yield lambda: subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    else:
        if shutil.which("bwrap", path=f"{os.environ['PATH']}:{FETCHED}") is None:
            pytest.skip("no bwrap: `make bubblewrap` fetches it")
        with changed_environment(PATH=f"{os.environ['PATH']}:{FETCHED}"):
            yield list


@contextmanager
def pool_or_skip(backend, n_workers=1):
    """A pool that is started; on exit it is shut down, and no process, container or cgroup of it is
    left."""
    before = sandbox_processes()
    with backend_or_skip(backend) as containers:
        pool = POOLS[backend](n_workers, max_consecutive_failures=50)
        asyncio.run(pool.start())
        try:
            yield pool
        finally:
            asyncio.run(pool.shutdown())
        assert containers() == []
        assert all(wait_for_end(pid) for pid in sandbox_processes() - before)
        assert wait_until(lambda: not cgroups_left()), cgroups_left()


def wait_until(holds, timeout_s=GONE_S):
    """Whether it held in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def cgroups_left():
    """The cgroups of containers of this process's tests."""
    return [path for parent in cgroups() for path in parent.iterdir() if path.is_dir() and path.name != "conmon"]


def sandbox_processes():
    """The sandboxes of this process, and processes of sandboxes whose parent has gone. Other tests
    may have theirs on the same machine."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"ludic.envs.code_exec.in_sandbox" in (entry / "cmdline").read_bytes():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found |= {int(entry.name)} if parent in (os.getpid(), 1) else set()
        except OSError:
            continue
    return found
