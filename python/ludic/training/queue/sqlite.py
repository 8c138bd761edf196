"""A log of groups in one SQLite file, for actors and a trainer on one machine.

The file has a write-ahead log and is flushed at its checkpoints (`synchronous=NORMAL`): killing
processes loses nothing that was acknowledged; a power failure may lose the last moments, which the
trainer then offers again. It must not be on a network file system, where SQLite's locks do not
work. Deleting the file (with its `-wal` and `-shm`) while it is in use costs its data only:
every process notices and makes a new one.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ludic.errors import OwnershipLost, QueueDataLost, QueueError, QueueRefused, check_value
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

SCHEMA_VERSION = 1
POLL_S = 0.005
"""How often `read` looks for new entries; one look takes 0.05 ms."""
_TABLES = """
create table facts (name text primary key, value) without rowid;
create table work (number integer primary key, version integer not null, attempt integer not null, offered_s real not null,
                   until_s real not null default 0, actor text, token text);
create table entries (id integer primary key autoincrement, number integer, payload blob not null);
create table aside (id integer primary key autoincrement, position text unique not null, number integer, payload blob not null,
                    reason text not null);
"""
Facts = dict[str, Any]
"""`epoch` (which data these are: part of every position), `run`, `owner`, `until_s` (end of the
claim), `closed`, `version`, `aside` and `claimed` (counters), `clock_s` (of the last change)."""


class SQLiteLog:
    """A `GroupLog` in the file `path`, whose folder must exist. Each call waits for at most
    `timeout_s` seconds for other processes. `clock` gives the seconds that leases and claims are
    measured in; all processes must agree on it. By default it is the machine's since its start,
    which is never set. When it begins anew, leases and claims of before have ended."""

    def __init__(self, path: str | Path, *, timeout_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        check_value("timeout_s", timeout_s, "it is how long a call waits for other processes", above=0)
        self.path = Path(path)
        self._timeout_s, self._clock = timeout_s, clock
        self._turn = threading.Lock()
        """Held while a thread uses the connection."""
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int, int] | None = None
        """Process, device and inode that the connection belongs to."""

    # ---- the trainer ---------------------------------------------------------------------------

    def claim(self, owner: str, *, run: str, ttl_s: float = DEFAULT_CLAIM_S) -> None:
        with self._transaction("claim") as db:
            facts, now = _read_facts(db), self._clock()
            if facts.get("run", run) != run:
                remaining_s = facts["until_s"] - now
                if remaining_s > 0 and not facts["closed"]:
                    other = f"{facts['run']} for another {remaining_s:.0f} s"
                    raise OwnershipLost(f"the queue {self.path} belongs to run {other}; stop it, or set another queue")
                _delete_data(db)
            _write_facts(db, owner=owner, run=run, until_s=now + ttl_s, closed=0)

    def renew_claim(self, owner: str, *, ttl_s: float = DEFAULT_CLAIM_S) -> None:
        with self._owned("renew_claim", owner) as db:
            _write_facts(db, until_s=self._clock() + ttl_s)

    def offer(self, owner: str, work: Sequence[Work]) -> int:
        with self._owned("offer", owner) as db:
            before: int = db.execute("select count(*) from work").fetchone()[0]
            db.executemany(
                "insert into work(number, version, attempt, offered_s) values(?, ?, ?, ?) on conflict(number) do update set "
                "version=excluded.version, attempt=excluded.attempt, until_s=0, actor=null, token=null "
                "where version != excluded.version",
                [(each.number, each.version, each.attempt, self._clock()) for each in work],
            )
            after: int = db.execute("select count(*) from work").fetchone()[0]
            return after - before

    def withdraw(self, owner: str, numbers: Sequence[int]) -> None:
        with self._owned("withdraw", owner) as db:
            db.executemany("delete from work where number = ?", [(number,) for number in numbers])

    def outstanding(self) -> list[OutstandingWork]:
        with self._transaction("outstanding", reads=True) as db:
            now = self._clock()
            rows = db.execute("select number, version, attempt, actor, until_s, offered_s from work order by number").fetchall()
        return [
            OutstandingWork(Work(number, version, attempt), actor if until_s > now else None, max(0.0, now - offered_s))
            for number, version, attempt, actor, until_s, offered_s in rows
        ]

    def read(self, after: str | None, *, limit: int = 16, timeout_s: float = 0.0) -> list[Entry]:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._transaction("read", reads=True) as db:
                epoch = _read_facts(db)["epoch"]
                query = "select id, number, payload from entries where id > ? order by id limit ?"
                rows = db.execute(query, (_id_of(after, epoch), limit)).fetchall()
            if rows or (remaining_s := deadline - time.monotonic()) <= 0:
                return [Entry(f"{epoch}-{row_id}", number, payload) for row_id, number, payload in rows]
            time.sleep(min(POLL_S, remaining_s))

    def forget(self, owner: str, through: str) -> None:
        with self._owned("forget", owner) as db:
            db.execute("delete from entries where id <= ?", (_id_of(through, _read_facts(db)["epoch"]),))

    def announce(self, owner: str, version: int) -> None:
        with self._owned("announce", owner) as db:
            _write_facts(db, version=version)

    def set_aside(self, entry: Entry, reason: str) -> None:
        with self._transaction("set_aside") as db:
            row = (entry.position, entry.number, entry.payload, reason)
            if db.execute("insert or ignore into aside(position, number, payload, reason) values(?, ?, ?, ?)", row).rowcount:
                db.execute("update facts set value = value + 1 where name = 'aside'")
                db.execute("delete from aside where id not in (select id from aside order by id desc limit ?)", (KEPT_ASIDE,))

    def aside(self) -> list[AsideEntry]:
        with self._transaction("aside", reads=True) as db:
            rows = db.execute("select position, number, payload, reason from aside order by id").fetchall()
        return [AsideEntry(Entry(position, number, payload), reason) for position, number, payload, reason in rows]

    def stats(self) -> QueueStats:
        with self._transaction("stats", reads=True) as db:
            now, facts = self._clock(), _read_facts(db)
            entries, size = db.execute("select count(*), total(length(payload)) from entries").fetchone()
            outstanding, leased, oldest = db.execute(
                "select count(*), coalesce(sum(until_s > ?), 0), min(offered_s) from work", (now,)
            ).fetchone()
        oldest_s = 0.0 if oldest is None else max(0.0, now - oldest)
        return QueueStats(entries, int(size), outstanding, leased, oldest_s, aside=facts["aside"], claimed=facts["claimed"])

    def close(self, owner: str) -> None:
        with self._owned("close", owner) as db:
            db.execute("delete from work")
            db.execute("delete from entries")
            _write_facts(db, closed=1)

    # ---- actors --------------------------------------------------------------------------------

    def lease(self, actor: str, *, lease_s: float = DEFAULT_LEASE_S) -> Lease | None:
        with self._transaction("lease", reads=True) as db:  # before, so that idle actors do not wait in line to write
            if db.execute("select 1 from work where until_s <= ? limit 1", (self._clock(),)).fetchone() is None:
                return None
        with self._transaction("lease") as db:
            facts, now = _read_facts(db), self._clock()
            query = "select number, version, attempt, token from work where until_s <= ? order by number limit 1"
            row = db.execute(query, (now,)).fetchone()
            if row is None or facts.get("run") is None or facts["closed"]:
                return None
            number, version, attempt, previous = row
            if previous is not None:  # its lease ran out
                attempt += 1
                db.execute("update facts set value = value + 1 where name = 'claimed'")
            token = uuid.uuid4().hex
            db.execute(
                "update work set attempt=?, actor=?, token=?, until_s=? where number=?",
                (attempt, actor, token, now + lease_s, number),
            )
        return Lease(Work(number, version, attempt), actor, facts["run"], token)

    def renew(self, lease: Lease, *, lease_s: float = DEFAULT_LEASE_S) -> bool:
        work, now = lease.work, self._clock()
        with self._transaction("renew") as db:
            return _is_of_run(db, lease) and bool(
                db.execute(
                    "update work set actor=?, token=?, until_s=? where number=? and version=? and (token=? or until_s <= ?)",
                    (lease.actor, lease.token, now + lease_s, work.number, work.version, lease.token, now),
                ).rowcount
            )

    def give_back(self, lease: Lease) -> None:
        with self._transaction("give_back") as db:
            db.execute(
                "update work set until_s=0, actor=null, token=null where number=? and token=?", (lease.work.number, lease.token)
            )

    def deliver(self, lease: Lease, payload: bytes) -> bool:
        check_size(payload)
        with self._transaction("deliver") as db:
            if not _is_of_run(db, lease):
                return False
            query = "delete from work where number = ? and version = ?"
            if not db.execute(query, (lease.work.number, lease.work.version)).rowcount:
                return False
            db.execute("insert into entries(number, payload) values(?, ?)", (lease.work.number, payload))
        return True

    def version(self) -> int | None:
        with self._transaction("version", reads=True) as db:
            version: int | None = _read_facts(db).get("version")
        return version

    def is_closed(self) -> bool:
        with self._transaction("is_closed", reads=True) as db:
            return bool(_read_facts(db)["closed"])

    # ---- producers without numbers -------------------------------------------------------------

    def push(self, payload: bytes, *, max_entries: int) -> bool:
        check_size(payload)
        with self._transaction("push") as db:
            if db.execute("select count(*) from entries").fetchone()[0] >= max_entries:
                return False
            db.execute("insert into entries(number, payload) values(null, ?)", (payload,))
        return True

    # ---- both ----------------------------------------------------------------------------------

    def disconnect(self) -> None:
        with self._turn:
            self._drop_connection()

    @contextmanager
    def _owned(self, call: str, owner: str) -> Iterator[sqlite3.Connection]:
        """A transaction of the owner."""
        with self._transaction(call) as db:
            current = _read_facts(db).get("owner")
            if current is None:
                raise QueueDataLost(f"no trainer owns the queue {self.path}: its data are gone; claim it and offer its groups")
            if current != owner:
                raise OwnershipLost(f"the queue {self.path} was claimed by another trainer ({current}); {owner} must stop")
            yield db

    @contextmanager
    def _transaction(self, call: str, *, reads: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction, which is rolled back if the block raises. Errors of SQLite are raised as
        QueueError."""
        if not self._turn.acquire(timeout=self._timeout_s):
            raise QueueError(f"{call}: another thread used the queue {self.path} for more than {self._timeout_s:g} s")
        try:
            db = self._connect()
            db.execute("begin" if reads else "begin immediate")
            try:
                if not reads:
                    _write_facts(db, clock_s=self._clock())
                yield db
                db.execute("commit")
            finally:
                if db.in_transaction:
                    db.execute("rollback")
        except sqlite3.Error as error:
            self._drop_connection()
            raise QueueError(f"{call}: the queue {self.path} failed: {error}{_remedy(error)}") from error
        finally:
            self._turn.release()

    def _connect(self) -> sqlite3.Connection:
        """The connection to the file as it is now: another process may have deleted it, and a
        forked process must not use its parent's."""
        if self._connection is not None and self._opened == self._identity():
            return self._connection
        self._drop_connection()
        db = sqlite3.connect(self.path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False)
        try:
            _use_wal(db, self._timeout_s)
            _prepare(db, self.path, self._clock)
        except BaseException:
            db.close()
            raise
        self._connection, self._opened = db, self._identity()
        return db

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return os.getpid(), status.st_dev, status.st_ino

    def _drop_connection(self) -> None:
        if self._connection is not None and self._opened is not None and self._opened[0] == os.getpid():
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = self._opened = None


def _use_wal(db: sqlite3.Connection, timeout_s: float) -> None:
    """Set the connection up. SQLite does not wait where another process writes to a file without a
    write-ahead log, such as one that both have just made."""
    db.execute("pragma synchronous = normal")
    last = time.monotonic() + timeout_s
    while True:
        try:
            db.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= last:
                raise
        time.sleep(0.005)


def _prepare(db: sqlite3.Connection, path: Path, clock: Callable[[], float]) -> None:
    """Make the tables of a new file. End the leases and the claim if the clock has begun anew since
    the last change: they were for a time that may never come."""
    db.execute("begin immediate")
    try:
        with closing(db.execute("pragma user_version")) as found:
            schema = found.fetchone()[0]
        if schema == 0:
            for statement in _TABLES.split(";\n"):
                db.execute(statement)
            _write_facts(db, epoch=uuid.uuid4().hex[:12], closed=0, aside=0, claimed=0)
            db.execute(f"pragma user_version = {SCHEMA_VERSION}")
        elif schema != SCHEMA_VERSION:
            raise QueueRefused(
                f"the queue {path} has version {schema}, this ludic reads {SCHEMA_VERSION}; use that, or delete it"
            )
        if _read_facts(db).get("clock_s", math.inf) > (now := clock()):
            db.execute("update work set until_s = 0, offered_s = ?", (now,))
            _write_facts(db, until_s=0, clock_s=now)
        db.execute("commit")
    finally:
        if db.in_transaction:
            db.execute("rollback")


def _read_facts(db: sqlite3.Connection) -> Facts:
    return dict(db.execute("select name, value from facts"))


def _write_facts(db: sqlite3.Connection, **facts: Any) -> None:
    db.executemany("insert or replace into facts(name, value) values(?, ?)", list(facts.items()))


def _delete_data(db: sqlite3.Connection) -> None:
    for table in ("work", "entries", "aside"):
        db.execute(f"delete from {table}")
    db.execute("delete from facts where name = 'version'")
    _write_facts(db, aside=0, claimed=0)


def _is_of_run(db: sqlite3.Connection, lease: Lease) -> bool:
    facts = _read_facts(db)
    return facts.get("run") == lease.run and not facts["closed"]


def _id_of(position: str | None, epoch: str) -> int:
    """The id in a position; 0, which is before all ids, for a position of other data. Example:
    `"3f2a-17"` is 17 in the data of epoch 3f2a."""
    if position is None:
        return 0
    prefix, _, number = position.rpartition("-")
    return int(number) if prefix == epoch else 0


def _remedy(error: sqlite3.Error) -> str:
    """What to do about it, in brackets; empty for what the message says itself."""
    remedies = {
        "locked": "another process holds it",
        "full": "free space on its disk",
        "unable to open": "its folder must exist and be writable",
        "malformed": "delete it and its -wal and -shm files; missing groups are played again",
        "not a database": "delete it; missing groups are played again",
    }
    return next((f" ({remedy})" for sign, remedy in remedies.items() if sign in str(error)), "")
