"""How containers are made, without one: limits, names, arguments, and the stream of Docker."""

import asyncio
import itertools
import os
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, strategies as st

from ludic.envs.code_exec import containers
from ludic.envs.code_exec.backend import create_sandbox_pool
from ludic.envs.code_exec.containers import USERS, ContainerPlan, Users, has_ended, megabytes_of, this_process
from ludic.envs.code_exec.docker_sandbox import DockerProcess, DockerSandboxConfig, DockerSandboxPool
from ludic.envs.code_exec.podman_sandbox import PodmanConfig, PodmanHPCSandbox, PodmanHPCSandboxPool, PodmanProcess, run_arguments
from ludic.envs.code_exec.process_sandbox import ProcessSandbox
from ludic.envs.code_exec.types import NoSandboxError
from ludic.errors import ConfigError, MissingExtraError


@pytest.mark.parametrize(("size", "megabytes"), [("256m", 256), ("1g", 1024), ("2GB", 2048), ("1048576", 1), ("2048k", 2)])
def test_sizes_of_memory(size, megabytes):
    assert megabytes_of(size) == megabytes


@pytest.mark.parametrize("size", ["", "m", "256x", "-1m", "1.5g", "1023k", "0"])
def test_sizes_that_are_refused(size):
    with pytest.raises(ConfigError, match=r"memory_limit \(.*\) .*b, k, m or g"):
        megabytes_of(size)


def test_each_container_has_a_name_and_a_user_of_its_own():
    plans = [ContainerPlan("p", "100m", "/work", True) for _ in range(20)]
    assert len({plan.name for plan in plans}) == 20
    assert all(plan.user in USERS for plan in plans)
    assert plans[0].places == {"/work": 64, "/tmp": 16, "/dev/shm": 16}
    assert plans[0].total_memory_mb == 100 + 96 + 128  # a program, its files, and what watches it


def test_no_two_containers_of_a_pool_have_the_same_user():
    users = Users()
    plans = [ContainerPlan("p", "100m", "/work", True, users) for _ in range(2_000)]
    assert len({plan.user for plan in plans}) == 2_000
    assert {users.draw() for _ in USERS} == set(USERS)  # also past the last one


@pytest.mark.parametrize("folder", ["/", "/tmp", "work"])
def test_a_working_folder_that_is_not_one_is_refused(folder):
    with pytest.raises(ConfigError, match="must be a folder of its own"):
        ContainerPlan("p", "100m", folder, True)


def test_whether_the_process_that_made_a_container_has_ended():
    machine, pid, start = this_process().rsplit(" ", 2)
    assert not has_ended(this_process())
    assert has_ended(f"{machine} {pid} {int(start) + 1}")  # another process has its number now
    assert has_ended(f"{machine} {2**22 + 1} 5")
    assert not has_ended(f"other/machine {2**22 + 1} 5")
    assert not has_ended("")


@pytest.mark.parametrize("hidden", [FileNotFoundError, PermissionError])
def test_a_process_that_cannot_be_seen_has_not_ended(monkeypatch, hidden):
    """As on a /proc with `hidepid`, where others' processes are not there, or not readable."""
    machine, _, start = this_process().rsplit(" ", 2)
    see = containers._start_of

    def see_own(pid):
        if pid != os.getpid():
            raise hidden(pid)
        return see(pid)

    monkeypatch.setattr(containers, "_start_of", see_own)
    assert not has_ended(f"{machine} {os.getppid()} {start}")


def test_a_process_that_may_not_be_read_has_not_ended(monkeypatch):
    machine, _, start = this_process().rsplit(" ", 2)

    def see(pid):
        if pid == 1:
            return "5"
        raise PermissionError(pid)

    monkeypatch.setattr(containers, "_start_of", see)
    assert not has_ended(f"{machine} 77 {start}")


def test_containers_of_another_user_are_left_alone(monkeypatch):
    machine = this_process().rsplit(" ", 2)[0]
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert not has_ended(f"{machine} {2**22 + 1} 5")


def test_what_podman_is_asked_for():
    plan = ContainerPlan("p", "100m", "/workspace", True)
    arguments = run_arguments(plan, "image", PodmanConfig(cpu_quota=50_000, extra_args=["--tty=false"]))
    pairs = set(itertools.pairwise(arguments))
    assert {
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--ipc", "none"),
        ("--user", f"{plan.user}:{plan.user}"),
        ("--memory", "324m"),
        ("--memory-swap", "324m"),
        ("--pids-limit", "48"),
        ("--cpu-quota", "50000"),
        ("--tty=false", "image"),
        ("image", "python3"),
    } <= pairs
    assert "--read-only" in arguments
    open_network = run_arguments(ContainerPlan("p", "100m", "/workspace", False), "image", PodmanConfig())
    assert "--network" not in open_network


@pytest.mark.parametrize(
    ("image", "version"), [("python:3.12-slim", "3.12"), ("docker.io/library/python:3.13", "3.13"), ("mine", "3.11")]
)
def test_the_version_in_the_name_of_an_image(image, version):
    assert PodmanHPCSandboxPool._parse_python_version(image) == version
    assert PodmanHPCSandboxPool(image=image).python_version == version


def test_containers_are_named_after_their_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert PodmanHPCSandboxPool._get_container_name_prefix() == "ludic-sandbox-local"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert PodmanHPCSandboxPool._get_container_name_prefix() == "ludic-sandbox-7"


def test_images_of_docker():
    assert DockerSandboxConfig(python_version="3.12").image == "python:3.12-slim"
    assert DockerSandboxConfig(base_image="mine:2").image == "mine:2"


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=20))), st.data())
def test_the_stream_of_docker_is_cut_at_any_place(frames, data):
    """The parts of stdout in their order, however the bytes arrive."""
    sent = b"".join(struct.pack(">BxxxI", stream, len(text)) + text for stream, text in frames)
    process = DockerProcess.__new__(DockerProcess)
    process._unread, received = bytearray(), b""
    while sent:
        size = data.draw(st.integers(1, len(sent)))
        received += process._payload(sent[:size])
        sent = sent[size:]
    assert received == b"".join(text for stream, text in frames if stream == 1)


def test_a_program_may_not_have_more_memory_than_its_sandbox():
    sandbox = ProcessSandbox(None, memory_limit_mb=100, most_memory_mb=100)
    with pytest.raises(ConfigError, match=r"memory_limit_mb \(200\) must be <= 100.*raise memory_limit"):
        asyncio.run(sandbox.execute("", memory_limit_mb=200))


def test_backends_that_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSandboxError, match="no Docker daemon answers"):
        asyncio.run(create_sandbox_pool(backend="docker"))
    with pytest.raises(NoSandboxError, match="podman is not installed; `apt install podman`"):
        asyncio.run(create_sandbox_pool(backend="podman"))
    with pytest.raises(NoSandboxError, match="podman-hpc is not installed"):
        asyncio.run(create_sandbox_pool(backend="podman-hpc"))
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ludic-rl\[docker\]'"):
        asyncio.run(create_sandbox_pool(backend="docker"))


def test_settings_without_effect_are_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"workspace_base_dir .* must be one of auto"):
        PodmanHPCSandboxPool(workspace_base_dir="/scratch")
    with pytest.raises(ConfigError, match=r"workspace_host_dir .* must be one of None"):
        PodmanHPCSandbox("a", "image", PodmanConfig(), workspace_host_dir="/scratch")
    with pytest.raises(ConfigError, match="executor_threads"):
        DockerSandboxPool(executor_threads=0)
    program = tmp_path / "podman"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="gpu=True needs podman-hpc"):
        PodmanHPCSandbox("a", "image", PodmanConfig(gpu=True))


def test_without_the_package_the_names_of_docker_are_none():
    code = (
        "import sys; sys.modules['docker'] = None\nimport ludic.envs.code_exec as c\nprint(c.DockerSandbox, c.DockerSandboxPool)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "None None\n"


def test_a_client_that_makes_a_container_ends_by_itself(tmp_path, monkeypatch):
    """If it were killed, no command would find what it has made."""
    client = tmp_path / "podman"
    client.write_text(f'#!/bin/sh\n[ "$1" = run ] || exit 0\ntouch {tmp_path}/begun\ncat\necho whole > {tmp_path}/ended\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    process = PodmanProcess("name", "image", PodmanConfig(command="podman"), Users())
    failures = []

    def start():
        try:
            process._start()
        except (EOFError, OSError) as error:
            failures.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    while starting.is_alive() and not (process._process and (tmp_path / "begun").exists()):
        time.sleep(0.01)
    process.end()
    starting.join(60)
    assert (tmp_path / "ended").read_text() == "whole\n"
    assert failures
