"""A log of groups on a Redis server: several machines can play and train.

Transactions are scripts (`redis_scripts`), so that no call is ever half done. The server needs
Redis 6.2 or newer, `maxmemory-policy noeviction`, and should have `appendonly yes`. Data that are
lost in spite of it, or deleted, cost the groups that were played and not trained: the trainer
claims the log again and offers missing groups again.

Calls have deadlines and are repeated after lost connections. URLs are shown without passwords.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from ludic.errors import ConfigError, MissingExtraError, OwnershipLost, QueueDataLost, QueueError, QueueRefused, check_value
from ludic.training.queue import redis_scripts as scripts
from ludic.training.queue.base import (
    DEFAULT_CLAIM_S,
    DEFAULT_LEASE_S,
    KEPT_ASIDE,
    AsideEntry,
    Entry,
    Lease,
    OutstandingWork,
    QueueStats,
    Work,
    check_size,
)

try:
    import redis
except ImportError as error:
    raise MissingExtraError.for_extra("redis", "redis") from error

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 30.0
"""How long a call tries to reach the server."""
WAIT_S = 2.0
"""Longest wait for entries in one command; it is shorter than the wait for an answer."""


class RedisLog:
    """A `GroupLog` on the server at `url`: `redis://[user[:password]@]host[:port][/db]`, or
    `rediss://` with TLS, whose certificate is verified (`?ssl_ca_certs=ca.pem` names an authority
    of your own).

    `prefix` names the log: runs at the same time need different ones. `deadline_s`: how long a call
    tries to reach the server before it raises QueueError. `clock` gives the seconds that leases and
    claims are measured in; without it, they are measured by the server. The password is never
    shown.

    >>> log = RedisLog("rediss://:secret@queue.example:6379", "run-7")
    >>> log
    RedisLog('rediss://***@queue.example:6379', 'run-7')
    """

    def __init__(
        self, url: str, prefix: str, *, deadline_s: float = DEFAULT_DEADLINE_S, clock: Callable[[], float] | None = None
    ) -> None:
        self._prefix = check_prefix(prefix)
        self._clock = clock
        self._server = RedisConnection(url, deadline_s=deadline_s)
        self._keys = [f"{{{prefix}}}:{name}" for name in scripts.KEYS]
        self._samples = self._keys[scripts.KEYS.index("samples")]
        self._aside = self._keys[scripts.KEYS.index("aside")]
        self._registered: dict[str, Callable[..., Any]] = {}

    def __repr__(self) -> str:
        return f"RedisLog({self._server.shown_url!r}, {self._prefix!r})"

    # ---- the trainer ---------------------------------------------------------------------------

    def claim(self, owner: str, *, run: str, ttl_s: float = DEFAULT_CLAIM_S) -> None:
        self._run(scripts.CLAIM, owner, run, _to_ms(ttl_s), secrets.token_hex(8))

    def renew_claim(self, owner: str, *, ttl_s: float = DEFAULT_CLAIM_S) -> None:
        self._run(scripts.RENEW_CLAIM, owner, _to_ms(ttl_s))

    def offer(self, owner: str, work: Sequence[Work]) -> int:
        return int(self._run(scripts.OFFER, owner, *(part for one in work for part in (one.number, one.version, one.attempt))))

    def withdraw(self, owner: str, numbers: Sequence[int]) -> None:
        self._run(scripts.WITHDRAW, owner, *numbers)

    def outstanding(self) -> list[OutstandingWork]:
        rows: list[list[Any]] = [[*map(int, row[:4]), _to_text(row[4])] for row in self._run(scripts.OUTSTANDING)]
        return [
            OutstandingWork(Work(number, version, attempt), actor or None, age_ms / 1000)
            for number, version, attempt, age_ms, actor in sorted(rows)
        ]

    def read(self, after: str | None, *, limit: int = 16, timeout_s: float = 0.0) -> list[Entry]:
        born, _, last = (after or "/").partition("/")
        deadline = time.monotonic() + timeout_s
        while True:
            found, rows = self._run(scripts.READ, born, last, limit)
            remaining_s = deadline - time.monotonic()
            now_born = _to_text(found)
            if rows or remaining_s <= 0:  # rows are of XRANGE: [id, [b"n", number, b"b", payload, ...]]
                return [Entry(f"{now_born}/{name.decode()}", _to_number(fields[1]), fields[3]) for name, fields in rows]
            waits_after = {self._samples: last if last and now_born == born else "0"}
            block_ms = max(1, int(min(remaining_s, WAIT_S) * 1000))
            self._server.call(partial(redis.Redis.xread, streams=waits_after, count=1, block=block_ms))

    def forget(self, owner: str, through: str) -> None:
        born, _, last = through.partition("/")
        self._run(scripts.FORGET, owner, born, last)

    def announce(self, owner: str, version: int) -> None:
        self._run(scripts.ANNOUNCE, owner, version)

    def set_aside(self, entry: Entry, reason: str) -> None:
        number = "" if entry.number is None else entry.number
        self._run(scripts.SET_ASIDE, entry.position, number, entry.payload, reason, KEPT_ASIDE)

    def aside(self) -> list[AsideEntry]:
        rows: Any = self._server.call(lambda client: client.xrange(self._aside))
        return [
            AsideEntry(Entry(fields[b"p"].decode(), _to_number(fields[b"n"]), fields[b"b"]), _to_text(fields[b"r"]))
            for _, fields in rows
        ]

    def stats(self) -> QueueStats:
        entries, size, outstanding, leased, oldest_ms, aside, claimed = map(int, self._run(scripts.STATS))
        self._server.warn_of_memory()
        return QueueStats(
            entries=entries,
            bytes=size,
            outstanding=outstanding,
            leased=leased,
            oldest_s=oldest_ms / 1000,
            aside=aside,
            claimed=claimed,
        )

    def close(self, owner: str) -> None:
        self._run(scripts.CLOSE, owner)

    # ---- actors --------------------------------------------------------------------------------

    def lease(self, actor: str, *, lease_s: float = DEFAULT_LEASE_S) -> Lease | None:
        token = secrets.token_hex(8)
        taken = self._run(scripts.LEASE, actor, token, _to_ms(lease_s))
        if taken is None:
            return None
        number, version, attempt = map(int, taken[:3])
        return Lease(Work(number, version, attempt), actor, _to_text(taken[3]), token)

    def renew(self, lease: Lease, *, lease_s: float = DEFAULT_LEASE_S) -> bool:
        work = lease.work
        return bool(self._run(scripts.RENEW, lease.run, work.number, work.version, lease.token, lease.actor, _to_ms(lease_s)))

    def give_back(self, lease: Lease) -> None:
        self._run(scripts.GIVE_BACK, lease.work.number, lease.token)

    def deliver(self, lease: Lease, payload: bytes) -> bool:
        check_size(payload)
        return bool(self._run(scripts.DELIVER, lease.run, lease.work.number, lease.work.version, payload))

    def version(self) -> int | None:
        version = self._fact("version")
        return None if version is None else int(version)

    def is_closed(self) -> bool:
        return self._fact("closed") == b"1"

    # ---- producers without numbers -------------------------------------------------------------

    def push(self, payload: bytes, *, max_entries: int) -> bool:
        check_size(payload)
        return bool(self._run(scripts.PUSH, payload, max_entries, secrets.token_hex(8)))

    # ---- both ----------------------------------------------------------------------------------

    def disconnect(self) -> None:
        self._server.disconnect()

    def _run(self, script: str, *arguments: Any) -> Any:
        """Run a script with all keys. Errors that our scripts return become exceptions."""
        if script not in self._registered:
            self._registered[script] = self._server.register(scripts.PRELUDE + script)
        run = self._registered[script]
        time_ms = "" if self._clock is None else _to_ms(self._clock())
        try:
            return self._server.call(lambda client: run(keys=self._keys, args=[*arguments, time_ms], client=client))
        except redis.exceptions.ResponseError as error:
            kind, _, owner = str(error).partition(" script:")[0].partition(" ")
            if kind == "LUDICLOST":
                raise QueueDataLost(f"{self!r} has no owner: the server lost its data; claim it again") from None
            raise OwnershipLost(f"{self!r} belongs to {owner}; give this run a queue name of its own, or stop that one") from None

    def _fact(self, name: str) -> bytes | None:
        fact: Any = self._server.call(lambda client: client.hget(self._keys[0], name))
        return None if fact is None else bytes(fact)


def _to_ms(seconds: float) -> int:
    return round(seconds * 1000)


def _to_text(value: bytes) -> str:
    """Bytes that are not UTF-8, which ludic did not write, become escapes."""
    return value.decode(errors="backslashreplace")


def _to_number(text: bytes) -> int | None:
    return int(text) if text else None


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
        check_value("deadline_s", deadline_s, above=0)
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
                is_refused = isinstance(error, _REFUSED)
                if is_refused or not (isinstance(error, _TEMPORARY) or str(error).startswith(_BUSY)):
                    refused = QueueRefused if is_refused else QueueError
                    raise refused(self._refusal(error)) from None  # the error itself may show the password
                if time.monotonic() + pause > deadline:
                    raise QueueError(
                        f"the queue at {self.shown_url} did not answer within {self._deadline_s:g} s ({self._scrub(error)}); is it running?"
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
            raise QueueRefused(f"the queue at {self.shown_url} has policy {policy}; run CONFIG SET maxmemory-policy noeviction")
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
        raise ConfigError(f"the queue's URL ({shown}) has no readable host and port; percent-encode its password (%2F for /)")
    settings = dict(parse_qsl(parts.query))
    unknown = sorted(name for name in settings if not name.startswith("ssl_") and name != "db")
    if unknown:
        raise ConfigError(f"the queue's URL ({shown}) has the settings {', '.join(unknown)}; db and ssl_... are allowed")
    secrets = {password, unquote(password), settings.get("ssl_password", "")}
    return sorted(secrets - {""}, key=len, reverse=True)


def check_prefix(prefix: str) -> str:
    """`prefix`, if it can be the hash tag of the keys: `{prefix}:work`."""
    if not prefix or any(mark in prefix for mark in "{}") or not prefix.isprintable():
        raise ConfigError(f"the queue's name ({prefix!r}) must have at least one character, and no braces")
    return prefix
