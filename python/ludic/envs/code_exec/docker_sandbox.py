"""Sandboxes in containers of a Docker daemon, by the package `docker`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

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
from ludic.envs.line_process import LineProcess
from ludic.errors import ConfigError, GradingError, LudicError, MissingExtraError, check_value
from ludic.event_loop import start_in_thread

logger = logging.getLogger(__name__)

FRAME = struct.Struct(">BxxxI")
"""What precedes each part of a container's output: 1 for stdout, 2 for stderr, and its size."""
STDOUT = 1
STREAMS = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
CPU_PERIOD_US = 100_000


@dataclass(frozen=True)
class DockerSandboxConfig:
    """Settings of all containers of a pool."""

    python_version: str = "3.11"
    base_image: str | None = None
    """With a `python3`. None means `python:VERSION-slim`."""
    memory_limit: str = "256m"
    """Of a program, unless its test asks for less. The container has some more, for files."""
    cpu_quota: int | None = 50_000
    """Microseconds of processor time in each 100,000: half a processor. None means no limit."""
    network_disabled: bool = True
    """False: the container has Docker's default network, and programs may use sockets."""
    working_dir: str = "/workspace"
    """Where programs start, in the container's memory."""
    create_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `docker`'s `containers.create`, such as `runtime="runsc"`."""

    @property
    def image(self) -> str:
        return self.base_image or f"python:{self.python_version}-slim"


class DockerRemover(Remover):
    """Removes the containers of a daemon."""

    def __init__(self, connected: Callable[[], Any]) -> None:
        """`connected` returns a client of the daemon."""
        super().__init__()
        self._connected = connected

    def _list_owners(self) -> dict[str, str]:
        try:
            listed = self._connected().api.containers(all=True, filters={"label": OWNER})
        except daemon_errors() as error:
            raise GradingError(f"the containers could not be listed: {error}") from error
        return {one["Names"][0].removeprefix("/"): one["Labels"][OWNER] for one in listed if one["Names"]}

    def _remove(self, container: str) -> None:
        not_found, failures = load_docker().errors.NotFound, daemon_errors()
        deadline = time.monotonic() + END_S
        while True:
            try:
                return self._connected().api.remove_container(container, force=True, v=True)
            except not_found:
                return None
            except failures as error:  # it is being removed, or the daemon starts again
                if time.monotonic() > deadline:
                    raise GradingError(f"the container {container} could not be removed: {error}") from error
            time.sleep(0.02)


class AttachedContainer:
    """A container that runs, by the socket of its stdin and stdout. It ends when that closes."""

    def __init__(self, container: Any, executor: ThreadPoolExecutor, remover: Remover) -> None:
        self._container, self._executor, self._remover = container, executor, remover
        self.stdin = self.stdout = container.attach_socket(params=STREAMS)
        self._socket = self.stdin._sock
        try:
            executor.submit(container.start).result()
        except BaseException:
            self._socket.close()
            raise

    def kill(self) -> None:
        """Close the socket in both directions, which ends the container and wakes who reads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self) -> int:
        """Remove the container, and return when it is gone."""
        self._socket.close()
        self._executor.submit(self._remover.remove, self._container.name).result()
        return 0


class DockerProcess(LineProcess):
    """The main process of a container that was created and has not started. It starts once."""

    def __init__(self, container: Any, executor: ThreadPoolExecutor, remover: Remover) -> None:
        super().__init__([], start_timeout_s=START_S, name=f"the container {container.name}", longest_reply=LONGEST_REPLY)
        self._container, self._executor, self._remover = container, executor, remover
        self._unread = bytearray()

    def _spawn(self) -> AttachedContainer:
        container, self._container = self._container, None
        if container is None:
            raise EOFError("the container has ended")
        try:
            return AttachedContainer(container, self._executor, self._remover)
        except BaseException as error:
            self._remover.remove(container.name)
            raise GradingError(f"{self._name} did not start: {type(error).__name__}: {error}") from error

    def _payload(self, part: bytes) -> bytes:
        """Docker sends stdout and stderr in frames, which reads need not end at."""
        self._unread += part
        out = b""
        while len(self._unread) >= FRAME.size:
            stream, size = FRAME.unpack_from(self._unread)
            end = FRAME.size + size
            if len(self._unread) < end:
                break
            text = bytes(self._unread[FRAME.size : end])
            del self._unread[:end]
            if stream == STDOUT:
                out += text
            else:
                self._last_words = f"; it said: {text.decode(errors='replace').strip()}"
        return out

    def end(self) -> int | None:
        """Also of a container that has not started."""
        container, self._container = self._container, None
        if container is not None:
            self._remover.remove(container.name)
        return super().end()


class DockerSandbox(ProcessSandbox):
    """Runs programs in a container that a pool has created. Once it has ended, every call fails."""

    def __init__(
        self, container: Any, config: DockerSandboxConfig, executor: ThreadPoolExecutor, remover: Remover | None = None
    ) -> None:
        """`container` is of the `docker` package. `executor` makes the calls that start it, and of
        `remover` those that remove it."""
        memory_mb = megabytes_of(config.memory_limit)
        super().__init__(
            DockerProcess(container, executor, remover or DockerRemover(lambda: container.client)),
            memory_limit_mb=memory_mb,
            most_memory_mb=memory_mb,
            expected_version=config.python_version,
        )


class DockerSandboxPool(ContainerPool):
    """A pool of `n_workers` containers of the Docker daemon of the environment (`DOCKER_HOST`)."""

    def __init__(
        self,
        n_workers: int = 4,
        config: DockerSandboxConfig | None = None,
        cache_size: int = 10_000,
        executor_threads: int = 8,
        auto_replace_failed: bool = False,
        max_consecutive_failures: int = 5,
        max_concurrent_ops: int = 8,
    ) -> None:
        """At most `executor_threads` containers are created, started or removed at a time."""
        self._config = config or DockerSandboxConfig()
        settings = (n_workers, cache_size, auto_replace_failed, max_consecutive_failures, max_concurrent_ops)
        super().__init__(self._config.python_version, DockerRemover(self._connected), *settings)
        check_value("executor_threads", executor_threads, least=1)
        self._executor = ThreadPoolExecutor(executor_threads, thread_name_prefix="ludic-docker")
        self._client: Any = None
        self._client_lock = threading.Lock()

    def _fetch_image(self) -> None:
        client, image = self._connected(), self._config.image
        try:
            client.images.get(image)
        except load_docker().errors.ImageNotFound:
            pull_image(client, image)

    async def shutdown(self) -> None:
        await super().shutdown()
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    async def _start_sandbox(self) -> DockerSandbox:
        create = self._executor.submit(create_container, self._connected(), self._config, self._users)
        try:
            container = await asyncio.wrap_future(create)
        except asyncio.CancelledError:
            if not create.cancel():
                self._executor.submit(self._remove_result, create)  # this event loop may be closed by then
            raise
        sandbox = DockerSandbox(container, self._config, self._executor, self._remover)
        await sandbox.start()
        self._version = sandbox.python_version
        return sandbox

    def _connected(self) -> Any:
        with self._client_lock:
            if self._client is None:
                self._client = connect(timeout_s=int(START_S))
            return self._client

    def _remove_result(self, created: Future[Any]) -> None:
        if created.exception() is None:
            try:
                self._remover.remove(created.result().name)
            except LudicError as error:
                logger.warning("%s", error)


def pull_image(client: Any, image: str, *, timeout_s: float = PULL_S) -> None:
    """GradingError if that fails or is not done in time."""
    # In a thread, since the package has no deadline for it.
    pulled = start_in_thread(lambda: client.images.pull(image), name="ludic-pull", daemon=True)
    try:
        pulled.result(timeout_s)
    except TimeoutError as error:
        raise GradingError(f"the image {image!r} is not there and was not pulled within {timeout_s} s") from error
    except daemon_errors() as error:
        raise GradingError(f"the image {image!r} is not there and could not be pulled: {error}") from error


def create_container(client: Any, config: DockerSandboxConfig, users: Users) -> Any:
    """A container that is hardened and has not started."""
    docker = load_docker()
    plan = ContainerPlan("ludic-sandbox", config.memory_limit, config.working_dir, config.network_disabled, users)
    own = f"uid={plan.user},gid={plan.user},mode=0700"
    places = {place: f"size={megabytes}m,{own}" for place, megabytes in plan.places.items()}
    options = {
        "name": plan.name,
        "labels": {OWNER: this_process()},
        "entrypoint": [],
        "command": plan.command,
        "environment": ENVIRONMENT,
        "user": f"{plan.user}:{plan.user}",
        "working_dir": "/",
        "stdin_open": True,
        "auto_remove": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "ipc_mode": "none",
        "log_config": docker.types.LogConfig(type="none"),
        "tmpfs": {**places, HIDDEN: "ro,size=4k"},
        "mem_limit": f"{plan.total_memory_mb}m",
        "memswap_limit": f"{plan.total_memory_mb}m",
        "pids_limit": MOST_TASKS,
        "ulimits": [docker.types.Ulimit(name=name, soft=limit, hard=limit) for name, limit in FILES_AND_PROCESSES.items()],
        **({"network_mode": "none"} if config.network_disabled else {}),
        **({} if config.cpu_quota is None else {"cpu_period": CPU_PERIOD_US, "cpu_quota": config.cpu_quota}),
    }
    return client.containers.create(config.image, **{**options, **config.create_options})


USUAL_ADDRESS = "unix:///var/run/docker.sock"


def load_docker() -> ModuleType:
    """The package. MissingExtraError without it."""
    try:
        import docker

        docker.from_env  # noqa: B018  # a folder of this name is no package
    except (ImportError, AttributeError) as error:
        raise MissingExtraError.for_extra("docker", "docker") from error
    return docker


def daemon_errors() -> tuple[type[Exception], ...]:
    """What a call to the daemon may raise. One that hangs or has ended is an OSError of requests,
    or an error of urllib3 while a reply is read."""
    from urllib3.exceptions import HTTPError  # comes with the package

    return (load_docker().errors.DockerException, OSError, HTTPError)


def connect(*, timeout_s: int = 60) -> Any:
    """A client of the daemon at DOCKER_HOST. NoSandboxError if none answers."""
    docker = load_docker()
    address = os.environ.get("DOCKER_HOST") or USUAL_ADDRESS
    try:
        scheme, _, path = address.partition("://")
        if scheme in ("unix", "http+unix"):
            with socket.socket(socket.AF_UNIX) as trial:  # the package leaves a socket open where no process listens
                trial.settimeout(timeout_s)
                trial.connect(path)
        client = docker.from_env(timeout=timeout_s)
    except (OSError, docker.errors.DockerException) as error:
        raise NoSandboxError(f"no Docker daemon answers at {address} ({error}); start one, or set DOCKER_HOST") from error
    if not client.api.base_url.startswith(("http://", "http+docker://localhost")):
        client.close()
        raise ConfigError(f"DOCKER_HOST ({address}) must be a Unix socket or plain TCP; forward the socket with `ssh -L`")
    return client
