"""Task folders in Harbor's format: their settings, and which are refused."""

import os
from pathlib import Path

import pytest
from agent_episodes import FETCHED, needs_bubblewrap
from hypothesis import given, strategies as st

from ludic.envs import harbor
from ludic.envs.harbor import choose_sandbox, hash_folder, plan_root, read_task
from ludic.envs.terminal import write_task
from ludic.envs.workspaces.sandbox import BubblewrapRoot
from ludic.errors import ConfigError

EXAMPLES = {
    "1.0": """
version = "1.0"
[metadata]
author_name = "someone"
difficulty = "easy"
tags = ["files"]
[verifier]
timeout_sec = 180.0
[agent]
timeout_sec = 120.5
[environment]
build_timeout_sec = 300.0
docker_image = "example/task:1"
cpus = 1
memory = "2G"
storage = "10G"
""",
    "1.1": """
schema_version = "1.1"
artifacts = []
[task]
name = "example/task"
description = "A task."
keywords = ["files"]
[[task.authors]]
name = "someone"
email = "someone@example.org"
[metadata]
expert_time_estimate_min = 5.0
[verifier]
timeout_sec = 180.0
[agent]
timeout_sec = 120.5
[environment]
build_timeout_sec = 300.0
docker_image = "example/task:1"
cpus = 1
memory_mb = 2048
storage_mb = 10240
gpus = 0
allow_internet = true
mcp_servers = []
[verifier.env]
[environment.env]
[solution.env]
""",
}
"""All keys that the public examples of the two versions have."""


@pytest.fixture
def folder(tmp_path):
    return write_task(tmp_path / "own", instruction="Do it.\n", test="true", files={"a": "1", "b": "2"})


def change(folder, text="", **files):
    (folder / "task.toml").write_text(text)
    for name, content in files.items():
        (folder / "environment" / name).write_text(content)
    return folder


@pytest.mark.parametrize("version", EXAMPLES)
def test_the_keys_of_public_tasks_are_read(version, folder):
    told = set()
    task = read_task(change(folder, EXAMPLES[version]), told=told)
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.build_timeout_s) == (120.5, 180.0, 300.0)
    assert (task.image, task.cpus, task.memory_mb, task.allows_network) == ("example/task:1", 1, 2048, True)
    assert (task.name, task.instruction, task.env) == ("own", "Do it.", {})
    assert told == set()


def test_a_task_without_settings_has_those_of_the_format(folder):
    task = read_task(change(folder))
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.image, task.allows_network) == (600.0, 600.0, None, True)


def test_keys_without_an_effect_are_listed(folder):
    text = """
colour = "red"
[agent]
user = "agent"
[environment]
storage_mb = 5
skills_dir = ""
healthcheck = {command = "true"}
network_mode = "no-network"
"""
    told = {"before"}
    assert not read_task(change(folder, text), told=told).allows_network
    assert told == {"before", "colour", "agent.user", "environment.healthcheck"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[verifier]\nenvironment_mode = "separate"', r"own has verifier.environment_mode = separate"),
        ("[verifier.environment]\ncpus = 1", r"own has verifier.environment_mode"),
        ("[environment]\ngpus = 2", r"own has environment.gpus = 2"),
        ('[environment]\nos = "windows"', r"own has environment.os = windows"),
        ('[[environment.mcp_servers]]\nname = "x"', r"own has environment.mcp_servers"),
        ('[[steps]]\nname = "x"', r"own has steps"),
        ("[agent]\ntimeout_sec = 0", r"own: agent: the deadline \(0\).*above 0"),
        ("[agent]\ntimeout_sec = nan", r"own: agent: the deadline \(nan\).*above 0"),
        ('[verifier]\ntimeout_sec = "10"', r"own: verifier: the deadline \('10'\)"),
        ('[environment]\nmemory = "lots"', r"own: environment.memory \('lots'\).*2G"),
        ("[environment]\ncpus = -1", r"own: environment.cpus \(-1\)"),
        ("[environment]\ndocker_image = 3", r"own: environment.docker_image \(3\)"),
        ("[environment]\nenv = 3", r"own: environment.env \(3\).*table"),
        ("environment = 3", r"environment \(3\) must be a table"),
        ("[", r"own cannot be read"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(text, said, folder):
    with pytest.raises(ConfigError, match=said):
        read_task(change(folder, text))


@pytest.mark.parametrize("name", ["docker-compose.yaml", "compose.yml"])
def test_compose_files_are_refused(name, folder):
    with pytest.raises(ConfigError, match=rf"own has environment/{name}, which is not supported"):
        read_task(change(folder, **{name: ""}))


@pytest.mark.parametrize("name", ["tests/test.sh", "environment/Dockerfile", "instruction.md", "task.toml"])
def test_a_missing_file_is_named(name, folder):
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"own .*{name.split('/')[-1]}"):
        read_task(folder)


def test_a_task_has_a_variable_of_this_machine_only_if_it_is_named(folder, monkeypatch):
    monkeypatch.setenv("LUDIC_TEST_KEY", "hidden")
    text = '[verifier.env]\nKEY = "x${LUDIC_TEST_KEY}"\nOTHER = "${LUDIC_TEST_KEY:-none}"'
    with pytest.raises(ConfigError, match=r"verifier.env wants LUDIC_TEST_KEY .*secrets=\[LUDIC_TEST_KEY\]"):
        read_task(change(folder, text))
    assert read_task(folder, secrets=["LUDIC_TEST_KEY"]).verifier_env == {"KEY": "xhidden", "OTHER": "hidden"}
    change(folder, '[verifier.env]\nOTHER = "${LUDIC_TEST_KEY:-none}"')
    assert read_task(folder).verifier_env == {"OTHER": "none"}


def test_a_dockerfile_of_four_instructions_is_a_root_of_bubblewrap(folder):
    text = (
        "FROM ubuntu:24.04\n# note\nWORKDIR /app\nWORKDIR sub\nCOPY files/a files/b x/\nCOPY . /all\nENV A=1 B='2 3'\nENV C 4 5"
    )
    copies, place, variables = plan_root(read_task(change(folder, Dockerfile=text)))
    environment = folder / "environment"
    assert copies == [
        (environment / "files/a", "/app/sub/x/a"),
        (environment / "files/b", "/app/sub/x/b"),
        (environment / ".", "/all"),
    ]
    assert (place, variables) == ("/app/sub", {"A": "1", "B": "2 3", "C": "4 5"})
    assert plan_root(read_task(change(folder, '[environment]\nworkdir = "/w"')))[1] == "/w"


@pytest.mark.parametrize(
    "line",
    [
        "RUN apt-get install git",
        "USER nobody",
        "COPY --from=base /x /y",
        "COPY --chown=1 files /y",
        'COPY ["files", "/y"]',
        "ENV A=$B",
        "FROM other",
        "COPY files /usr/share/x",
        "WORKDIR /bin",
    ],
)
def test_another_instruction_needs_a_container_and_is_named(line, folder):
    task = read_task(change(folder, Dockerfile=f"FROM ubuntu:24.04\n{line}\n"))
    with pytest.raises(ConfigError, match=r"own needs Docker or Podman: bubblewrap cannot do") as error:
        plan_root(task)
    assert line.split()[-1] in str(error.value)


@pytest.mark.parametrize("source", ["missing", "../tests", "link"])
def test_only_files_of_the_environment_are_copied(source, folder):
    (folder / "environment" / "link").symlink_to(folder / "tests")
    task = read_task(change(folder, Dockerfile=f"FROM x\nCOPY {source} /app"))
    with pytest.raises(ConfigError, match=rf"COPY {source}: there is no such file"):
        plan_root(task)


def test_a_sandbox_that_is_not_there_is_an_error_that_says_so(folder, monkeypatch):
    monkeypatch.setattr(harbor, "_is_ready", lambda program: False)
    task = read_task(folder)
    with pytest.raises(ConfigError, match=r"sandbox \(docker\) needs docker.*not installed"):
        choose_sandbox(task, "docker")
    with pytest.raises(ConfigError, match=r"needs Docker, Podman or bubblewrap"):
        choose_sandbox(task, "auto")
    with pytest.raises(ConfigError, match=r"sandbox \('dokcer'\).*docker"):
        choose_sandbox(task, "dokcer")


def test_the_choice_of_auto_is_a_container_where_there_are_some(folder, monkeypatch):
    made = {}
    for ready, kind in {("docker", "podman"): "docker", ("podman", "bubblewrap"): "podman"}.items():
        monkeypatch.setattr(harbor, "_is_ready", ready.__contains__)
        monkeypatch.setattr(harbor, "TaskContainer", lambda program, task, network, mounts: made.update({program: network}))
        choose_sandbox(read_task(folder), "auto", network=True)()
        assert made == {kind: True}
        made.clear()


def test_a_program_that_is_installed_later_is_found(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs podman"):
        choose_sandbox(read_task(folder), "podman")
    (tmp_path / "podman").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "podman").chmod(0o755)
    choose_sandbox(read_task(folder), "podman")


def make_own(task):
    return task.name


def test_a_sandbox_of_ones_own_is_called_with_the_task(folder):
    assert choose_sandbox(read_task(folder), f"{__name__}:make_own")() == "own"


@given(st.sampled_from(["files/a", "Dockerfile"]), st.binary(max_size=5))
def test_the_digest_of_a_folder_changes_with_a_file(tmp_path_factory, name, content):
    folder = write_task(tmp_path_factory.mktemp("d") / "own", instruction="", test="", files={"a": "1"}) / "environment"
    before, was = hash_folder(folder), (folder / name).read_bytes()
    (folder / name).write_bytes(content)
    assert (hash_folder(folder) == before) == (was == content)


@pytest.mark.integration
async def test_put_follows_no_link_of_an_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{FETCHED}")
    needs_bubblewrap()
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "x").write_text("new")
    root = BubblewrapRoot(folder="/app")
    try:
        await root.start()
        assert await root.put(tmp_path / "given", "/tests") == "/tests"
        assert await root.get("/tests/x") == "new"
        with pytest.raises(ConfigError, match=r"/app/inner cannot be put.*folder of the root"):
            await root.put(tmp_path / "given", "/app/inner")
        assert Path(await root.put(tmp_path / "given", "shown")).name == "shown"
    finally:
        await root.stop()
