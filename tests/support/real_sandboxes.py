"""Pools of real sandboxes for tests, which check that nothing is left of them.

A bubblewrap that is not on PATH is taken from target/bubblewrap (`make bubblewrap` fetches it).
"""

import asyncio
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import wait_for_end

from ludic.envs.code_exec.bubblewrap import BubblewrapSandboxPool

FETCHED = Path(__file__).parents[2] / "target" / "bubblewrap"
BACKENDS = ["bubblewrap"]


@contextmanager
def pool_or_skip(backend):
    if shutil.which("bwrap", path=f"{os.environ['PATH']}:{FETCHED}") is None:
        pytest.skip("no bwrap: `make bubblewrap` fetches it")
    with open_pool(backend, n_workers=1) as pool:
        yield pool


@contextmanager
def open_pool(backend, n_workers):
    """A pool that is started; on exit it is shut down, and none of its processes is left."""
    before, path = sandbox_processes(), os.environ["PATH"]
    os.environ["PATH"] = f"{path}:{FETCHED}"
    try:
        pool = BubblewrapSandboxPool(n_workers, max_consecutive_failures=50)
        asyncio.run(pool.start())
        try:
            yield pool
        finally:
            asyncio.run(pool.shutdown())
    finally:
        os.environ["PATH"] = path
    assert all(wait_for_end(pid) for pid in sandbox_processes() - before)


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
