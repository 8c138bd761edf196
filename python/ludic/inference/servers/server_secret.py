"""The secret of a server, as its clients and its starter use it: a request that changes what the
server serves has to carry it.

A server that we start gets a random secret in its environment. A copy is in a file that its user
alone can read, named after machine and port, where the same user's trainer finds it. For servers on
other machines `LUDIC_SERVER_SECRET` gives both sides the same secret, which is not written
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
from ludic.inference.vllm.in_server.secret import HEADER, VARIABLE, SecretError, is_this_machine, secret_file

__all__ = ["HEADER", "VARIABLE", "drop_secret", "is_this_machine", "keep_secret", "secret_file", "secret_headers", "secret_of"]


def secret_of(environment: Mapping[str, str]) -> str:
    """The value of `LUDIC_SERVER_SECRET`, else a new secret of 256 random bits. Raises
    ConfigError for a value that is too short, or that no header can carry."""
    with _config_errors():
        return server_side.secret_of(environment)


def keep_secret(port: int, secret: str) -> Path:
    """Write the file, readable by its user alone from the start. Raises ConfigError if it cannot
    be written."""
    with _config_errors():
        return server_side.keep_secret(port, secret)


@contextlib.contextmanager
def _config_errors() -> Iterator[None]:
    try:
        yield
    except SecretError as error:
        raise ConfigError(str(error)) from error


def drop_secret(port: int, secret: str) -> None:
    """Remove the file, unless it belongs to a later server by now."""
    if _read(secret_file(port)) == secret:
        with contextlib.suppress(OSError):
            secret_file(port).unlink()


def secret_headers(url: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What goes with a request that may change what the server at `url` serves: the secret of
    `LUDIC_SERVER_SECRET`, else that of the server at this port of this machine, else nothing."""
    env = os.environ if environment is None else environment
    secret = env.get(VARIABLE) or _stored_secret(url)
    return {HEADER: secret} if secret else {}


def _stored_secret(url: str) -> str | None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return _read(secret_file(parts.port)) if is_this_machine(host) and parts.port else None


def _read(path: Path) -> str | None:
    """The secret in a file. None if there is no file, or if anybody else could have written or
    read it."""
    try:
        with open(path, encoding="ascii") as file:
            about = os.fstat(file.fileno())
            private = about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o077
            return file.read().strip() or None if private else None
    except (OSError, ValueError):
        return None
