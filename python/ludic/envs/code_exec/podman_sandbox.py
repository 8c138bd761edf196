"""Sandboxes in containers of Podman, which needs no daemon, or of podman-hpc in a computing centre.

Both are used by their command line, which is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import IO

from ludic.envs.code_exec.containers import (
    END_S,
    ENVIRONMENT,
    FILES_AND_PROCESSES,
    HIDDEN,
    MOST_TASKS,
    OWNER,
    PULL_S,
    START_S,
    ContainerPlan,
    ContainerPool,
    Remover,
    Users,
    megabytes_of,
    this_process,
)
from ludic.envs.code_exec.pool import LRUCache as LRUCache
from ludic.envs.code_exec.process_sandbox import LONGEST_REPLY, ProcessSandbox
from ludic.envs.code_exec.types import NoSandboxError
from ludic.envs.line_process import LineProcess, Running
from ludic.errors import ConfigError, GradingError, check_value

COMMANDS = ("podman-hpc", "podman")
CPU_PERIOD_US = 100_000


class PodmanError(GradingError):
    """A command of Podman failed; the message has what it said."""


@dataclass(frozen=True)
class PodmanResult:
    """What a command of Podman ended with."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class PodmanConfig:
    """Settings of all containers of a pool."""

    memory_limit: str = "256m"
    """Of a program, unless its test asks for less. The container has some more, for files."""
    cpu_quota: int | None = None
    """Microseconds of processor time in each 100,000. None means no limit."""
    network_disabled: bool = True
    """False: the container has Podman's default network, and programs may use sockets."""
    working_dir: str = "/workspace"
    """Where programs start, in the container's memory."""
    gpu: bool = False
    """Give containers the GPUs, by podman-hpc."""
    extra_args: list[str] | None = None
    """Further arguments of `podman run`."""
    command: str | None = None
    """`podman` or `podman-hpc`. None means podman-hpc if it is found, else podman."""


def find_podman(command: str | None = None) -> str:
    """The path of the program. NoSandboxError if there is none."""
    for name in (command,) if command else COMMANDS:
        if (path := shutil.which(name)) is not None:
            return path
    raise NoSandboxError(f"{command or 'podman'} is not installed; `apt install podman` installs Podman")


def run_podman(arguments: Sequence[str], *, timeout_s: float, failure: str | None = None) -> PodmanResult:
    """Run a command to its end. PodmanError if it does not end in time, or if it fails and a
    message for its `failure` is given."""
    try:
        ended = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise PodmanError(f"`{' '.join(arguments[:3])}` did not end within {timeout_s} s") from error
    if failure is not None and ended.returncode != 0:
        raise PodmanError(f"{failure}: {ended.stderr.strip()[-500:]}")
    return PodmanResult(ended.returncode, ended.stdout, ended.stderr)


class ContainerRemover(Remover):
    """Removes the containers of Podman, or of another program with its command line: Docker's."""

    def __init__(self, command: str | None) -> None:
        super().__init__()
        self._command = command

    def _list_owners(self) -> dict[str, str]:
        program, named = find_podman(self._command), ["--filter", f"label={OWNER}", "--format", "{{.Names}}"]
        listed = run_podman([program, "ps", "--all", *named], timeout_s=END_S, failure="the containers could not be listed")
        if not (names := listed.stdout.split()):
            return {}
        # What is gone by now is not shown.
        shown = f'{{{{.Name}}}}\t{{{{index .Config.Labels "{OWNER}"}}}}'
        inspected = run_podman([program, "inspect", "--format", shown, *names], timeout_s=END_S)
        return dict(line.removeprefix("/").split("\t", 1) for line in inspected.stdout.splitlines() if "\t" in line)

    def _remove(self, container: str) -> None:
        program = find_podman(self._command)
        at_once = [] if os.path.basename(program) == "docker" else ["--time", "0", "--ignore"]
        ended = run_podman([program, "rm", "--force", "--volumes", *at_once, container], timeout_s=END_S)
        if ended.returncode and "No such container" not in ended.stderr:
            raise PodmanError(f"the container {container} could not be removed: {ended.stderr.strip()[-500:]}")


class PodmanClient(subprocess.Popen[bytes]):
    """The `podman run` that a container is attached to. Its container is removed with it."""

    def __init__(self, command: Sequence[str], stderr: IO[bytes], container: str, remover: Remover) -> None:
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
        self._container, self._remover = container, remover
        self.has_answered = False
        """Whether the container runs."""

    def kill(self) -> None:
        """Until the container has answered, the client only loses its input, with which both end: a
        client that is killed while it makes a container leaves what no command finds."""
        if self.has_answered:
            super().kill()
        elif self.stdin is not None:
            with contextlib.suppress(OSError):
                self.stdin.close()

    def wait(self, timeout: float | None = END_S) -> int:
        """Remove the container, and return the client's exit status when both are gone. The client
        is killed after `timeout` seconds."""
        try:
            super().wait(timeout)
        except subprocess.TimeoutExpired:
            super().kill()
        code = super().wait()
        self._remover.remove(self._container)
        return code


class PodmanProcess(LineProcess):
    """The main process of a container, by the `podman run` that it is attached to."""

    def __init__(self, name: str, image: str, config: PodmanConfig, users: Users, remover: Remover | None = None) -> None:
        self._podman, self._prefix, self._image, self._config = find_podman(config.command), name, image, config
        self._users, self._remover = users, remover or ContainerRemover(config.command)
        if config.gpu and not self._podman.endswith("-hpc"):
            raise ConfigError("gpu=True needs podman-hpc; for podman, give extra_args what your driver asks for")
        super().__init__([], start_timeout_s=START_S, name=f"the container {name}", longest_reply=LONGEST_REPLY)

    def _spawn(self) -> PodmanClient:
        config = self._config
        plan = ContainerPlan(self._prefix, config.memory_limit, config.working_dir, config.network_disabled, self._users)
        self._name = f"the container {plan.name}"
        command = [self._podman, *run_arguments(plan, self._image, config)]
        return PodmanClient(command, self._new_stderr(), plan.name, self._remover)

    def _start(self) -> Running:
        client = super()._start()
        assert isinstance(client, PodmanClient)
        client.has_answered = True
        return client


def run_arguments(plan: ContainerPlan, image: str, config: PodmanConfig) -> list[str]:
    """Of `podman run`."""
    arguments = ["run", "--interactive", "--rm", "--name", plan.name, "--label", f"{OWNER}={this_process()}"]
    arguments += ["--pull", "never", "--log-driver", "none"]
    arguments += ["--user", f"{plan.user}:{plan.user}", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    arguments += ["--read-only", "--read-only-tmpfs=false", "--ipc", "none", "--workdir", "/", "--entrypoint", "[]"]
    arguments += ["--tmpfs", f"{HIDDEN}:ro,size=4k"]
    for place, megabytes in plan.places.items():
        arguments += ["--tmpfs", f"{place}:size={megabytes}m,mode=0700,U"]
    arguments += ["--memory", f"{plan.total_memory_mb}m", "--memory-swap", f"{plan.total_memory_mb}m"]
    arguments += ["--pids-limit", str(MOST_TASKS)]
    for name, limit in FILES_AND_PROCESSES.items():
        arguments += ["--ulimit", f"{name}={limit}:{limit}"]
    if config.cpu_quota is not None:
        arguments += ["--cpu-period", str(CPU_PERIOD_US), "--cpu-quota", str(config.cpu_quota)]
    arguments += ["--network", "none"] if plan.network_disabled else []
    arguments += ["--gpu"] if config.gpu else []
    for name, value in ENVIRONMENT.items():
        arguments += ["--env", f"{name}={value}"]
    return [*arguments, *(config.extra_args or []), image, *plan.command]


class PodmanHPCSandbox(ProcessSandbox):
    """Runs programs in a container of `image`, which must be there already.

    It starts at `start` or with the first program. `container_name` begins the name of its
    container. At most as many sandboxes start or stop at the same time as `exec_semaphore` allows.
    """

    def __init__(
        self,
        container_name: str,
        image: str,
        config: PodmanConfig,
        python_version: str = "3.11",
        exec_semaphore: asyncio.Semaphore | None = None,
        workspace_host_dir: str | None = None,
        users: Users | None = None,
        remover: Remover | None = None,
    ) -> None:
        check_value("workspace_host_dir", workspace_host_dir, "what programs write is in memory", choices=[None])
        process = PodmanProcess(container_name, image, config, users or Users(), remover)
        memory_mb = megabytes_of(config.memory_limit)
        super().__init__(process, memory_limit_mb=memory_mb, most_memory_mb=memory_mb, expected_version=python_version)
        self._semaphore = exec_semaphore

    async def start(self) -> None:
        """Start the container; if that fails, nothing is left of it."""
        async with self._semaphore or nullcontext():
            await super().start()

    async def stop(self) -> None:
        async with self._semaphore or nullcontext():
            await super().stop()


class PodmanHPCSandboxPool(ContainerPool):
    """A pool of `n_workers` containers of Podman, or of podman-hpc where that is found."""

    def __init__(
        self,
        n_workers: int = 4,
        image: str = "python:3.11-slim",
        config: PodmanConfig | None = None,
        cache_size: int = 10_000,
        auto_replace_failed: bool = True,
        max_consecutive_failures: int = 5,
        max_concurrent_ops: int = 8,
        workspace_base_dir: str = "auto",
    ) -> None:
        self._image, self._config = image, config or PodmanConfig()
        settings = (n_workers, cache_size, auto_replace_failed, max_consecutive_failures, max_concurrent_ops)
        super().__init__(self._parse_python_version(image), ContainerRemover(self._config.command), *settings)
        check_value("workspace_base_dir", workspace_base_dir, "what programs write is in memory", choices=["auto"])

    def _fetch_image(self) -> None:
        podman = find_podman(self._config.command)
        if run_podman([podman, "image", "exists", self._image], timeout_s=END_S).returncode != 0:
            failure = f"the image {self._image!r} could not be pulled"
            run_podman([podman, "pull", "--quiet", self._image], timeout_s=PULL_S, failure=failure)

    async def _start_sandbox(self) -> PodmanHPCSandbox:
        name = self._get_container_name_prefix()
        sandbox = PodmanHPCSandbox(name, self._image, self._config, self._version, users=self._users, remover=self._remover)
        await sandbox.start()
        self._version = sandbox.python_version
        return sandbox

    @staticmethod
    def _parse_python_version(image: str) -> str:
        """Of an image such as `python:3.11-slim`; "3.11" if the name does not say."""
        found = re.search(r":(\d+\.\d+)", image)
        return found[1] if found else "3.11"

    @staticmethod
    def _get_container_name_prefix() -> str:
        return f"ludic-sandbox-{os.environ.get('SLURM_JOB_ID', 'local')}"
