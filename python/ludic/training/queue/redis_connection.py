"""Calls of a Redis server: deadlines, repetition after lost connections, what the server must be
set to, and URLs without their passwords."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from ludic.errors import ConfigError, MissingExtraError, QueueError, QueueRefused

try:
    import redis as redis  # exported: the modules beside this one import it from here
except ImportError as error:
    raise MissingExtraError.for_extra("redis", "redis") from error

logger = logging.getLogger(__name__)

SCHEMES = ("redis", "rediss", "unix")
OLDEST_SERVER = (6, 2)
"""The first version with XTRIM MINID."""
ATTEMPT_S = 5.0
"""Longest wait for one answer; a call is repeated until its deadline."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Pauses between attempts double, each is drawn between half and the whole of its length."""
MEMORY_READ_EVERY_S = 60.0

_TEMPORARY = (
    redis.exceptions.ConnectionError,  # also while the server reads its data
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,  # the replica that took over is not a master yet
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)
_REFUSED = (
    redis.exceptions.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.MaxConnectionsError,
)
"""Another attempt does not help. Most are subclasses of ConnectionError."""
_BUSY = "BUSY "
"""Begins the reply of a server that runs a long script of somebody else."""

Result = TypeVar("Result")


class RedisConnection:
    """A server at `url`, with the connections of this process to it. Threads may share it.

    `deadline_s`: longest duration of a call, with all its attempts. Every call that goes through
    `call` may be executed twice, if the answer of the first attempt was lost.
    """

    def __init__(self, url: str, *, deadline_s: float) -> None:
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s ({deadline_s}) must be > 0")
        self.shown_url = hide_password(url)
        self._deadline_s = deadline_s
        self._secrets = _secrets_of(url)
        self._client = self._open(url, min(ATTEMPT_S, deadline_s))
        self._checked = False
        self._memory_read_at = float("-inf")

    def register(self, script: str) -> Callable[..., Any]:
        """A script that `call` can run: it is sent once and then called by its hash."""
        return self._client.register_script(script)

    def call(self, command: Callable[[redis.Redis], Result]) -> Result:
        """The result of `command(client)`. Raises QueueError if there is none by the deadline, or
        if the server refuses the command, and QueueRefused if it refuses this client or cannot hold
        a queue; errors of scripts that begin with LUDIC are raised as they are."""
        deadline, pause = time.monotonic() + self._deadline_s, FIRST_PAUSE_S
        while True:
            try:
                self._check_server()
                return command(self._client)
            except redis.exceptions.RedisError as error:
                if str(error).startswith("LUDIC"):
                    raise
                if not _is_temporary(error):
                    refused = QueueRefused if isinstance(error, _REFUSED) else QueueError
                    raise refused(self._refusal(error)) from None  # the error itself may show the password
                if time.monotonic() + pause > deadline:
                    raise QueueError(
                        f"the queue at {self.shown_url} did not answer within {self._deadline_s:g} s "
                        f"({self._scrub(error)}); start the server, or check the address and the network"
                    ) from None
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def warn_of_memory(self) -> None:
        """Warn if the server has used half of the memory that it may use. Looks once a minute."""
        if time.monotonic() - self._memory_read_at < MEMORY_READ_EVERY_S:
            return
        self._memory_read_at = time.monotonic()
        memory = self.call(lambda client: client.info("memory"))
        used, allowed = int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))
        if allowed and used > allowed / 2:
            logger.warning(
                "the queue at %s uses %.0f of the %.0f MB that its maxmemory allows; when they are used up, actors wait. Save "
                "checkpoints more often, since entries are kept until the next one, or raise maxmemory",
                self.shown_url,
                used / 2**20,
                allowed / 2**20,
            )

    def disconnect(self) -> None:
        """Close all connections; a later call opens new ones."""
        self._client.connection_pool.disconnect()

    def _open(self, url: str, timeout_s: float) -> redis.Redis:
        try:
            return redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),  # `call` repeats, up to its deadline
                client_name="ludic",
            )
        except Exception as error:
            raise ConfigError(f"{self.shown_url} is no usable queue URL: {self._scrub(error)}") from None

    def _check_server(self) -> None:
        """Raise QueueRefused, before the first command, for a server that would lose entries
        without being killed."""
        if self._checked:
            return
        facts = self._client.info("everything")
        version = str(facts.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
            raise QueueRefused(f"the queue at {self.shown_url} is Redis {version}; 6.2 or newer is needed")
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise QueueRefused(
                f"the queue at {self.shown_url} has maxmemory-policy {policy}, which deletes entries when memory is short; set it to "
                "noeviction (`CONFIG SET maxmemory-policy noeviction`, and the same in redis.conf)"
            )
        self._checked = True
        if not int(facts.get("aof_enabled", 1)):
            logger.warning(
                "the queue at %s has appendonly off: what it holds is played again after a restart of the server; set "
                "`appendonly yes`",
                self.shown_url,
            )

    def _refusal(self, error: Exception) -> str:
        text = self._scrub(error)
        if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in text:
            return (
                f"the queue at {self.shown_url} is full ({text}); entries are kept until the next checkpoint: save checkpoints more "
                "often, or raise maxmemory"
            )
        return f"the queue at {self.shown_url} refused a command: {text}"

    def _scrub(self, error: Exception) -> str:
        """The error's text without the password: some servers repeat the command that they
        refuse."""
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def hide_password(url: str) -> str:
    """The URL for messages: `rediss://me:secret@host:6379/0?x=y` becomes `rediss://***@host:6379/0`.

    Everything before the last `@` is hidden, since a password may hold any character.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***"
    _, at, place = rest.rpartition("@")
    if not at and any(key.endswith("password") for key, _ in parse_qsl(rest.partition("?")[2])):
        at = "@"
    return f"{scheme}://{'***@' if at else ''}{place.partition('?')[0].partition('#')[0]}"


def _secrets_of(url: str) -> list[str]:
    """The password of a URL, as it is written and as it is sent. Raises ConfigError for a URL that
    names no server, without showing it."""
    shown = hide_password(url)
    if url.partition("://")[0] not in SCHEMES:
        raise ConfigError(f"the queue's URL ({shown}) must begin with redis://, rediss:// (TLS) or unix://")
    try:
        parts = urlsplit(url)
        password, port = parts.password or "", parts.port
    except ValueError:
        port = -1
    if port == -1 or "@" in parts.path + parts.query + parts.fragment:
        raise ConfigError(
            f"the queue's URL ({shown}) has no readable host and port; write the characters / ? # @ : of a password as %2F %3F %23 "
            "%40 %3A"
        )
    settings = dict(parse_qsl(parts.query))
    unknown = sorted(name for name in settings if not name.startswith("ssl_") and name != "db")
    if unknown:
        raise ConfigError(f"the queue's URL ({shown}) has the settings {', '.join(unknown)}; db and ssl_... are allowed")
    secrets = {password, unquote(password), settings.get("ssl_password", "")}
    return sorted(secrets - {""}, key=len, reverse=True)


def _is_temporary(error: Exception) -> bool:
    if isinstance(error, _REFUSED):
        return False
    return isinstance(error, _TEMPORARY) or str(error).startswith(_BUSY)


def check_prefix(prefix: str) -> str:
    """`prefix`, if it can be the hash tag of the keys: `{prefix}:work`."""
    if not prefix or any(mark in prefix for mark in "{}") or not prefix.isprintable():
        raise ConfigError(f"the queue's name ({prefix!r}) must have at least one character, and no braces")
    return prefix
