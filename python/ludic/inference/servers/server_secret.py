"""The secret of a server: whoever would change what it serves sends it with the request.

A server that we start is given a random one in its environment. A copy lies in a file that its user
alone can read, named after machine and port, where the same user's trainer finds it. For servers on
other machines `LUDIC_SERVER_SECRET` gives both sides the same one, which is written nowhere. It
runs in the server's environment too: standard library alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ludic.errors import ConfigError

HEADER = "X-Ludic-Secret"
VARIABLE = "LUDIC_SERVER_SECRET"
FOLDER_VARIABLE = "LUDIC_SERVER_SECRETS"
FEWEST_CHARACTERS = 16


def secret_of(environment: Mapping[str, str]) -> str:
    """What `LUDIC_SERVER_SECRET` says, else a new one of 256 random bits. ConfigError for one
    that is short, or no header's value."""
    given = environment.get(VARIABLE)
    if not given:
        return secrets.token_urlsafe(32)
    if len(given) < FEWEST_CHARACTERS or not given.isascii() or not given.isprintable() or " " in given:
        raise ConfigError(
            f"{VARIABLE} must be at least {FEWEST_CHARACTERS} printable ASCII characters without spaces; unset it for a random one"
        )
    return given


def secret_file(port: int) -> Path:
    """Where the secret of the server at a port of this machine lies. `LUDIC_SERVER_SECRETS`
    names another folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder or Path(cache, "ludic", "servers")) / f"{socket.gethostname()}-{port}"  # homes may be shared by machines


def keep_secret(port: int, secret: str) -> Path:
    """Write the file, which its user alone can read from its first moment on. Raises ConfigError
    where it cannot be written."""
    path = secret_file(port)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, aside = tempfile.mkstemp(dir=path.parent)  # of mode 0600
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secret)
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(
            f"the server's secret cannot be written to {path} ({error.strerror}); name a folder that can be with {FOLDER_VARIABLE}"
        ) from error
    return path


def drop_secret(port: int, secret: str) -> None:
    """Remove the file, unless it is of a later server by now."""
    if _read(secret_file(port)) == secret:
        with contextlib.suppress(OSError):
            secret_file(port).unlink()


def secret_headers(url: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What goes with a request that may change what the server at `url` serves: the secret of
    `LUDIC_SERVER_SECRET`, else that of the server at this port of this machine, else nothing."""
    env = os.environ if environment is None else environment
    secret = env.get(VARIABLE) or _known(url)
    return {HEADER: secret} if secret else {}


def _known(url: str) -> str | None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return _read(secret_file(parts.port)) if is_this_machine(host) and parts.port else None


def is_this_machine(host: str) -> bool:
    """Whether a host's name or address is that of the loopback interface."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path) -> str | None:
    """None where there is none, or where anybody else could have written or read it."""
    try:
        with open(path, encoding="ascii") as file:
            about = os.fstat(file.fileno())
            private = about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o077
            return file.read().strip() or None if private else None
    except (OSError, ValueError):
        return None
