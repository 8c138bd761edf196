"""The secret of a server, which a request must have to change what the server serves."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

HEADER = "X-Ludic-Secret"
VARIABLE = "LUDIC_SERVER_SECRET"
FOLDER_VARIABLE = "LUDIC_SERVER_SECRETS"
MIN_CHARACTERS = 16


class SecretError(ValueError):
    """A secret that cannot be used or stored."""


def resolve_secret(environment: Mapping[str, str]) -> str:
    """The value of `LUDIC_SERVER_SECRET`, else a new secret of 256 random bits. Raises SecretError
    for a value that is too short or not valid in a header."""
    secret = environment.get(VARIABLE)
    if not secret:
        return secrets.token_urlsafe(32)
    if len(secret) < MIN_CHARACTERS or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise SecretError(f"{VARIABLE} must be at least {MIN_CHARACTERS} printable ASCII characters without spaces")
    return secret


def secret_file(port: int) -> Path:
    """The file with the secret of the server at this port of this machine. `LUDIC_SERVER_SECRETS`
    names another folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder or Path(cache, "ludic", "servers")) / f"{socket.gethostname()}-{port}"  # machines may share a home


def store_secret(port: int, secret: str) -> Path:
    """Write the file, which only its user can ever read. Raises SecretError if it cannot be
    written."""
    path = secret_file(port)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)  # with mode 0600
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secret)
        os.replace(temporary, path)
    except OSError as error:
        raise SecretError(f"the secret cannot be written to {path} ({error.strerror}); set {FOLDER_VARIABLE}") from error
    return path


def is_loopback_host(host: str) -> bool:
    """Whether the name or address belongs to the loopback interface."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
