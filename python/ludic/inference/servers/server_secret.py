"""The secret of a server, for its clients and the process that starts it. A request that changes
what the server serves must have it.

A server that ludic starts gets a random secret in its environment. A copy is in a file that only
its user can read, named after machine and port, where the same user's trainer finds it. For servers
on other machines, set `LUDIC_SERVER_SECRET` to the same secret on both sides; it is not written
anywhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ludic.errors import ConfigError
from ludic.inference.vllm.in_server import secret as server_side
from ludic.inference.vllm.in_server.secret import HEADER, VARIABLE, SecretError, is_loopback_host, secret_file


def resolve_secret(environment: Mapping[str, str]) -> str:
    """The value of `LUDIC_SERVER_SECRET`, else a new secret of 256 random bits. Raises
    ConfigError for a value that is too short or not valid in a header."""
    with _translate_errors():
        return server_side.resolve_secret(environment)


def store_secret(port: int, secret: str) -> Path:
    """Write the file, which only its user can ever read. Raises ConfigError if it cannot be
    written."""
    with _translate_errors():
        return server_side.store_secret(port, secret)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except SecretError as error:
        raise ConfigError(str(error)) from error


def remove_secret(port: int, secret: str) -> None:
    """Remove the file, unless it belongs to a later server."""
    if _read_private(secret_file(port)) == secret:
        with contextlib.suppress(OSError):
            secret_file(port).unlink()


def secret_headers(url: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The headers of a request that may change what the server at `url` serves: the secret of
    `LUDIC_SERVER_SECRET`, else the one of the server at this port of this machine, else none."""
    secret, parts = environment.get(VARIABLE), urlsplit(url)
    if not secret and is_loopback_host(parts.hostname or "") and parts.port:
        secret = _read_private(secret_file(parts.port))
    return {HEADER: secret} if secret else {}


def _read_private(path: Path) -> str | None:
    """The secret in a file. None if there is no file, or if other users could write or read it."""
    try:
        with open(path, encoding="ascii") as file:
            status = os.fstat(file.fileno())
            is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
            return file.read().strip() or None if is_private else None
    except (OSError, ValueError):
        return None
