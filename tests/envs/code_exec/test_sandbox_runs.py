"""Whole runs in every kind of real sandbox: every verdict is right, and nothing is left."""

import asyncio
import re
import subprocess
from pathlib import Path

import pytest
from benches.python.hostile_contest import contests, is_right
from real_containers import CGROUP, IMAGE, docker_daemon, docker_pool, own_podman, podman_pool, podman_settings
from real_sandboxes import BACKENDS, pool_or_skip

from ludic.envs.code_exec.backend import create_sandbox_pool
from ludic.envs.code_exec.containers import OWNER, this_process
from ludic.envs.code_exec.types import SandboxPoolExhaustedError

PAGE = Path(__file__).parents[3] / "docs" / "code.md"
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("sandboxes")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_lost_or_left(backend):
    """One in five programs is hostile, a sandbox is killed every second, and at last the run."""
    finished, killed = contests(backend, count=50, workers=2, kill_every_s=1.0, rounds=1)
    assert is_right(finished), finished
    assert finished["programs"] == 50
    assert is_right(killed), killed
    assert killed["had_processes"] > 0


def test_what_a_killed_process_has_left_goes_at_the_next_start_of_podman():
    """A container that was created and not started: its process waits for the start."""
    ended = f"{this_process().rsplit(' ', 1)[0]} 0"  # another process had this one's number before
    with own_podman() as podman:

        def run(*arguments):
            return subprocess.run([podman, *arguments], check=True, capture_output=True, text=True, timeout=300).stdout.split()

        placed = [
            "--volume",
            "/usr:/usr:ro",
            "--cgroup-parent",
            f"/{CGROUP}",
            "--ulimit",
            "nofile=1024:1024",
            "--ulimit",
            "nproc=256:256",
        ]
        for name, owner in (("left", ended), ("kept", this_process())):
            run("create", "--name", name, "--network", "none", "--label", f"{OWNER}={owner}", *placed, IMAGE, "true")
            run("init", name)
        pool = podman_pool(1)
        asyncio.run(pool.start())
        names = run("ps", "--all", "--format", "{{.Names}}")
        asyncio.run(pool.shutdown())
        run("rm", "--force", "kept")
    assert "left" not in names
    assert "kept" in names


def test_what_a_killed_process_has_left_goes_at_the_next_start():
    ended = f"{this_process().rsplit(' ', 1)[0]} 0"  # another process had this one's number before
    with docker_daemon() as client:
        left, kept = (client.containers.create(IMAGE, "true", labels={OWNER: owner}) for owner in (ended, this_process()))
        pool = docker_pool(1)
        asyncio.run(pool.start())
        names = {one.name for one in client.containers.list(all=True)}
        asyncio.run(pool.shutdown())
        kept.remove()
    assert left.name not in names
    assert kept.name in names


def test_a_pool_that_cannot_replace_its_sandbox_says_why():
    async def play(client):
        pool = docker_pool(1, max_consecutive_failures=3)
        await pool.start()
        try:
            sandbox = await pool.checkout()
            client.images.remove(IMAGE, force=True)
            sandbox._process.kill()
            await pool.release(sandbox)
            with pytest.raises(SandboxPoolExhaustedError, match=r"3 failures in a row, .*start: .*[Nn]o such image"):
                await pool.checkout(timeout_s=300)
        finally:
            await pool.shutdown()

    with docker_daemon() as client:
        asyncio.run(play(client))


def test_podman_hpc_is_used_by_its_own_name():
    async def play():
        pool = await create_sandbox_pool(1, "podman-hpc", **podman_settings("podman-hpc"))
        try:
            return await (await pool.checkout()).execute("print(42)"), pool.python_version
        finally:
            await pool.shutdown()

    with own_podman("podman-hpc"):
        result, version = asyncio.run(play())
    assert result.stdout == "42\n"
    assert re.fullmatch(r"3\.\d+", version)


def test_the_example_of_the_page_runs(capsys):
    (example,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    with pool_or_skip("bubblewrap"):
        exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == "1.0\n0.5\n"
