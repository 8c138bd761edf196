"""How the Docker daemon of the environment is reached."""

from __future__ import annotations

import os
import socket
from types import ModuleType
from typing import Any

from ludic.envs.code_exec.types import NoSandboxError
from ludic.errors import ConfigError, MissingExtraError

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
        _try_socket(address, timeout_s)
        client = docker.from_env(timeout=timeout_s)
    except (OSError, docker.errors.DockerException) as error:
        raise NoSandboxError(
            f"no Docker daemon answers at {address} ({error}); start one that this user may reach, or set DOCKER_HOST"
        ) from error
    if not client.api.base_url.startswith(("http://", "http+docker://localhost")):
        client.close()
        raise ConfigError(
            f"containers can be attached to over a Unix socket or plain TCP, not at {address}; forward the daemon's socket, "
            "for example with `ssh -L`, and set DOCKER_HOST to it"
        )
    return client


def _try_socket(address: str, timeout_s: float) -> None:
    """OSError if nobody listens there. The package leaves such sockets open."""
    scheme, _, path = address.partition("://")
    if scheme in ("unix", "http+unix"):
        with socket.socket(socket.AF_UNIX) as trial:
            trial.settimeout(timeout_s)
            trial.connect(path)
