"""Where the servers of a run are: `servers/NAME.json` in its folder, and the secret that they
share."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from ludic.errors import CheckpointError, ConfigError
from ludic.files.atomic import read_json, write_json
from ludic.inference.vllm.in_server.secret import HEADER, VARIABLE

SECRET = "secret"


class ServerAddresses:
    """The addresses that the servers of a run wrote, by name."""

    def __init__(self, folder: Path) -> None:
        """`folder` is `servers` in the run's folder."""
        self._folder = folder

    def write(self, name: str, url: str) -> None:
        """The server `name` answers at `url` from now on."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(name), {"url": url, "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})

    def read(self, name: str) -> str | None:
        """The last address; None if there is none."""
        try:
            return str(read_json(self._path(name))["url"])
        except (FileNotFoundError, KeyError, CheckpointError):
            return None

    def forget(self, name: str) -> None:
        """The server is not ready."""
        self._path(name).unlink(missing_ok=True)

    def make_secret(self) -> str:
        """The secret of all servers of the run: `LUDIC_SERVER_SECRET` if it is set, else a random
        one in a file that only this user can read."""
        if given := os.environ.get(VARIABLE):
            return given
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = self._folder / f".{SECRET}.{os.getpid()}"
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):  # another server was faster
            os.link(aside, self._folder / SECRET)
        aside.unlink()
        return (self._folder / SECRET).read_text(encoding="ascii")

    def secret_headers(self) -> Mapping[str, str]:
        """What requests need that change what the servers serve. Raises ConfigError before the
        first server has started."""
        given = os.environ.get(VARIABLE)
        try:
            return {HEADER: given or (self._folder / SECRET).read_text(encoding="ascii")}
        except FileNotFoundError as error:
            raise ConfigError(f"{error.filename} does not exist: no server of the run has started") from error

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
