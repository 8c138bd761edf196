"""Opens the log that a setting names: a file, or a Redis server."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ludic.errors import ConfigError
from ludic.training.queue.base import GroupLog
from ludic.training.queue.sqlite import SQLiteLog

FILE_NAME = "queue.sqlite"
"""The file in a run's folder."""
URL_VARIABLE = "LUDIC_QUEUE_URL"
"""Environment variable that is read where the URL is empty, so that no script has a password."""


def open_log(where: str | Path, *, name: str, timeout_s: float = 30.0) -> GroupLog:
    """The log at `redis://` or `rediss://`, whose keys begin with `name`, or that in a folder or
    in a file of SQLite. Each call of the log takes at most `timeout_s` seconds.

    Nothing is reached or created yet. Raises ConfigError for another kind of address, without
    showing it: it may have a password.

    >>> log = open_log("runs/sort", name="sort")
    >>> log.path
    PosixPath('runs/sort/queue.sqlite')
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", str(where))
    if scheme is None:
        path = Path(where)
        return SQLiteLog(path / FILE_NAME if path.suffix != ".sqlite" else path, timeout_s=timeout_s)
    if scheme[1] not in ("redis", "rediss"):
        raise ConfigError(f"a queue at {scheme[1]}:// is unknown; give redis://, rediss:// (with TLS), or a folder")
    from ludic.training.queue.redis import RedisLog

    return RedisLog(str(where), name, deadline_s=timeout_s)


def open_server_queue(url: str, name: str) -> GroupLog:
    """The log `name` on the Redis server at `url`, or if that is empty at the one that
    LUDIC_QUEUE_URL names."""
    from ludic.training.queue.redis import RedisLog  # raises an error that names the extra

    url = url or os.environ.get(URL_VARIABLE, "")
    if not url:
        raise ConfigError(f"redis_url and {URL_VARIABLE} are empty; give the URL of a Redis server, such as redis://host:6379")
    return RedisLog(url, name)
