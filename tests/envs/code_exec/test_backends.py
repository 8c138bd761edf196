"""Which backend is chosen, and what is said when there is none."""

import asyncio
import os
import shutil

import pytest

from ludic.envs.code_exec import backend as backends
from ludic.envs.code_exec.backend import SandboxBackend, create_sandbox_pool, detect_available_backend, get_backend_info
from ludic.envs.code_exec.bubblewrap import BubblewrapConfig, BubblewrapProcess
from ludic.envs.code_exec.types import NoSandboxError
from ludic.errors import ConfigError

CHECKS = {name: f"is_{name.replace('-', '_')}_available" for name in ("bubblewrap", "docker", "podman", "podman-hpc")}


@pytest.fixture
def machine(monkeypatch):
    """A machine on which the named backends work."""

    def set_up(*working, job=None):
        for name, check in CHECKS.items():
            monkeypatch.setattr(backends, check, lambda name=name: name in working)
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        if job is not None:
            monkeypatch.setenv("SLURM_JOB_ID", job)

    return set_up


@pytest.mark.parametrize(
    ("working", "job", "chosen"),
    [
        (["bubblewrap", "docker", "podman", "podman-hpc"], None, "bubblewrap"),
        (["docker", "podman", "podman-hpc"], None, "docker"),
        (["docker", "podman", "podman-hpc"], "7", "podman-hpc"),
        (["docker", "podman"], "7", "docker"),
        (["podman"], None, "podman"),
    ],
)
def test_the_first_backend_that_works_is_chosen(machine, working, job, chosen):
    machine(*working, job=job)
    assert detect_available_backend() == chosen
    info = get_backend_info()
    assert info["environment"] == {"in_slurm": job is not None, "slurm_job_id": job}
    assert {name for name, entry in info["backends"].items() if entry["available"] and name in CHECKS} == set(working)


@pytest.mark.parametrize("name", ["podman", "podman-hpc"])
def test_a_podman_that_cannot_run_is_not_available(name, monkeypatch, tmp_path):
    is_available = getattr(backends, CHECKS[name])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_available()
    for body, works in [("[ $1 = info ]", True), ("exit 125", False), ("exec /bin/sleep 600", False)]:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
        if "sleep" in body:
            monkeypatch.setattr(backends, "TRIAL_S", 0.01)
        assert is_available() == works


def test_without_a_backend_the_error_says_what_to_install(machine):
    machine()
    with pytest.raises(RuntimeError, match=r"No sandbox backend.*apt install bubblewrap.*ludic-rl\[docker\]") as caught:
        asyncio.run(create_sandbox_pool())
    assert isinstance(caught.value, NoSandboxError)
    with pytest.raises(NoSandboxError, match=r"bubblewrap does not work .*`apt install bubblewrap`"):
        asyncio.run(create_sandbox_pool(backend="bubblewrap"))


def test_in_a_checkout_the_error_says_how_bubblewrap_is_fetched(machine, tmp_path):
    machine()
    (tmp_path / ".ci").mkdir()
    assert backends._in_a_checkout(tmp_path) == ""
    (tmp_path / ".ci" / "get-program").write_text("")
    assert f"`make -C {tmp_path} bubblewrap && export PATH={tmp_path}/target/bubblewrap:$PATH`" in backends._in_a_checkout(
        tmp_path
    )
    with pytest.raises(NoSandboxError, match=r"make -C .* bubblewrap"):  # the tests are of a checkout
        detect_available_backend()


def test_unknown_names_and_settings_without_effect_are_refused():
    with pytest.raises(ConfigError, match=r"Unknown backend 'qemu'; .*auto, bubblewrap, docker"):
        asyncio.run(create_sandbox_pool(backend="qemu"))
    with pytest.raises(NotImplementedError, match="Singularity backend is not yet implemented"):
        asyncio.run(create_sandbox_pool(backend="singularity"))
    with pytest.raises(ConfigError, match=r"workspace_base_dir \('/scratch'\) must be one of auto"):
        asyncio.run(create_sandbox_pool(workspace_base_dir="/scratch"))


def test_programs_run_without_a_sandbox_only_if_that_is_spelt_out(machine):
    machine()

    async def play():
        with pytest.warns(RuntimeWarning, match="without a sandbox"):
            pool = await create_sandbox_pool(1, SandboxBackend.UNSAFE_SUBPROCESS, python_version=None)
        try:
            return await (await pool.checkout()).execute("print(6 * 7)")
        finally:
            await pool.shutdown()

    assert asyncio.run(play()).stdout == "42\n"


def test_as_root_the_interpreter_must_be_readable_by_all(monkeypatch, tmp_path):
    """Programs run as a user without rights."""
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "python3").write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/env")
    monkeypatch.setattr("ludic.envs.code_exec.bubblewrap.find_python", lambda *_, **__: tmp_path / "home" / "python3")
    with pytest.raises(ConfigError, match=r"home/python3 must be readable by all users"):
        BubblewrapProcess(BubblewrapConfig())
