"""A log of groups on a Redis server: several machines can play and train.

Transactions are scripts (`redis_scripts`), so that no call is ever half done. The server needs
Redis 6.2 or newer, `maxmemory-policy noeviction`, and should have `appendonly yes`. Data that are
lost in spite of it, or deleted, cost what was played and not trained: the trainer claims the log
again and offers again what is missing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from ludic.errors import OwnershipLost, QueueDataLost
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
from ludic.training.queue.redis_connection import RedisConnection, check_prefix, redis

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
            if rows or remaining_s <= 0:
                return [_to_entry(_to_text(found), row) for row in rows]
            self._wait_for_entry(last if last and _to_text(found) == born else "0", min(remaining_s, WAIT_S))

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
                raise QueueDataLost(
                    f"{self!r} has no owner: the server lost its data, or somebody deleted them; claim it again"
                ) from None
            raise OwnershipLost(
                f"{self!r} belongs to {owner}; a queue has one trainer: give this run a name of its own, or stop the other one"
            ) from None

    def _fact(self, name: str) -> bytes | None:
        fact: Any = self._server.call(lambda client: client.hget(self._keys[0], name))
        return None if fact is None else bytes(fact)

    def _wait_for_entry(self, after: str, timeout_s: float) -> None:
        """Return when there is an entry after this id, after `timeout_s` seconds at the latest."""
        block_ms = max(1, int(timeout_s * 1000))
        self._server.call(lambda client: client.xread({self._samples: after}, count=1, block=block_ms))


def _to_ms(seconds: float) -> int:
    return round(seconds * 1000)


def _to_text(value: bytes) -> str:
    """Bytes that are not UTF-8, which ludic did not write, become escapes."""
    return value.decode(errors="backslashreplace")


def _to_number(text: bytes) -> int | None:
    return int(text) if text else None


def _to_entry(born: str, row: Any) -> Entry:
    """The entry in a row of XRANGE: `[id, [b"n", number, b"b", payload, ...]]`."""
    identifier, fields = row
    return Entry(f"{born}/{identifier.decode()}", _to_number(fields[1]), fields[3])
