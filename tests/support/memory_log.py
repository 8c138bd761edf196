"""A log of groups in dictionaries: the model that real logs are compared with, and a fast one for
simulations."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from ludic.errors import DataError, OwnershipLost, QueueDataLost, QueueError
from ludic.training.queue.base import (
    KEPT_ASIDE,
    MAX_PAYLOAD_BYTES,
    AsideEntry,
    Entry,
    Lease,
    OutstandingWork,
    QueueStats,
    Work,
)


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Row:
    work: Work
    offered_s: float
    until_s: float = 0.0
    actor: str | None = None
    token: str | None = None


@dataclass
class Data:
    """Everything that is gone when the data are lost."""

    epoch: str = field(default_factory=lambda: uuid.uuid4().hex[:6])
    owner: str | None = None
    run: str | None = None
    until_s: float = 0.0
    closed: bool = False
    version: int | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    next_id: int = 1
    aside: list[AsideEntry] = field(default_factory=list)
    num_aside: int = 0
    num_claimed: int = 0


def one_call_at_a_time(model: type) -> type:
    """A class decorator: each public method holds the lock of its object."""

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with self.lock:
                return method(self, *args, **options)

        return call

    for name, method in list(vars(model).items()):
        if not name.startswith("_"):
            setattr(model, name, locked(method))
    return model


@one_call_at_a_time
class MemoryLog:
    """A `GroupLog`. `fail` is called at the start of every call, and again before its answer is
    given, with the name of the call: raising there is a server that cannot be reached, or an answer
    that is lost."""

    def __init__(self, clock: Callable[[], float], *, fail: Callable[[str], None] = lambda call: None) -> None:
        self.clock, self.data, self.fail = clock, Data(), fail
        self.lock = threading.RLock()

    def lose_data(self) -> None:
        self.data = Data()

    def disconnect(self) -> None:
        pass

    def _own(self, owner: str) -> Data:
        if self.data.owner is None:
            raise QueueDataLost("the data are gone")
        if self.data.owner != owner:
            raise OwnershipLost(f"{self.data.owner} owns the log")
        return self.data

    def claim(self, owner: str, *, run: str, ttl_s: float = 30.0) -> None:
        self.fail("claim")
        data = self.data
        if data.run not in (None, run):
            if not data.closed and data.until_s > self.clock():
                raise OwnershipLost(f"run {data.run} owns the log")
            data = self.data = Data(epoch=data.epoch, next_id=data.next_id)
        data.owner, data.run, data.until_s, data.closed = owner, run, self.clock() + ttl_s, False
        self.fail("claim")

    def renew_claim(self, owner: str, *, ttl_s: float = 30.0) -> None:
        self.fail("renew_claim")
        self._own(owner).until_s = self.clock() + ttl_s

    def offer(self, owner: str, work: Sequence[Work]) -> int:
        self.fail("offer")
        rows, added = self._own(owner).rows, 0
        for each in work:
            if each.number not in rows:
                added += 1
                rows[each.number] = Row(each, self.clock())
            elif rows[each.number].work.version != each.version:
                rows[each.number] = Row(each, rows[each.number].offered_s)
        self.fail("offer")
        return added

    def withdraw(self, owner: str, numbers: Sequence[int]) -> None:
        self.fail("withdraw")
        data = self._own(owner)
        for number in numbers:
            data.rows.pop(number, None)

    def outstanding(self) -> list[OutstandingWork]:
        self.fail("outstanding")
        now = self.clock()
        rows = sorted(self.data.rows.values(), key=lambda row: row.work.number)
        return [OutstandingWork(row.work, row.actor if row.until_s > now else None, now - row.offered_s) for row in rows]

    def read(self, after: str | None, *, limit: int = 16, timeout_s: float = 0.0) -> list[Entry]:
        self.fail("read")
        return [entry for number, entry in sorted(self.data.entries.items()) if number > self._id_of(after)][:limit]

    def _id_of(self, position: str | None) -> int:
        epoch, _, number = (position or "-0").rpartition("-")
        return int(number) if epoch == self.data.epoch else 0

    def forget(self, owner: str, through: str) -> None:
        self.fail("forget")
        data, last = self._own(owner), self._id_of(through)
        data.entries = {number: entry for number, entry in data.entries.items() if number > last}
        self.fail("forget")

    def announce(self, owner: str, version: int) -> None:
        self.fail("announce")
        self._own(owner).version = version

    def set_aside(self, entry: Entry, reason: str) -> None:
        self.fail("set_aside")
        if all(kept.entry.position != entry.position for kept in self.data.aside):
            self.data.aside = [*self.data.aside, AsideEntry(entry, reason)][-KEPT_ASIDE:]
            self.data.num_aside += 1

    def aside(self) -> list[AsideEntry]:
        return list(self.data.aside)

    def stats(self) -> QueueStats:
        self.fail("stats")
        data, now = self.data, self.clock()
        return QueueStats(
            entries=len(data.entries),
            bytes=sum(len(entry.payload) for entry in data.entries.values()),
            outstanding=len(data.rows),
            leased=sum(row.until_s > now for row in data.rows.values()),
            oldest_s=max((now - row.offered_s for row in data.rows.values()), default=0.0),
            aside=data.num_aside,
            claimed=data.num_claimed,
        )

    def close(self, owner: str) -> None:
        self.fail("close")
        data = self._own(owner)
        data.rows, data.entries, data.closed = {}, {}, True

    def lease(self, actor: str, *, lease_s: float = 60.0) -> Lease | None:
        self.fail("lease")
        data, now = self.data, self.clock()
        free = [row for row in data.rows.values() if row.until_s <= now]
        if data.run is None or data.closed or not free:
            return None
        row = min(free, key=lambda row: row.work.number)
        if row.token is not None:
            data.num_claimed += 1
            row.work = replace(row.work, attempt=row.work.attempt + 1)
        row.actor, row.token, row.until_s = actor, uuid.uuid4().hex, now + lease_s
        self.fail("lease")
        return Lease(row.work, actor, data.run, row.token)

    def _row_of(self, lease: Lease) -> Row | None:
        row = self.data.rows.get(lease.work.number)
        is_open = self.data.run == lease.run and not self.data.closed
        return row if row is not None and is_open and row.work.version == lease.work.version else None

    def renew(self, lease: Lease, *, lease_s: float = 60.0) -> bool:
        self.fail("renew")
        row, now = self._row_of(lease), self.clock()
        if row is None or (row.token != lease.token and row.until_s > now):
            return False
        row.actor, row.token, row.until_s = lease.actor, lease.token, now + lease_s
        return True

    def give_back(self, lease: Lease) -> None:
        self.fail("give_back")
        row = self.data.rows.get(lease.work.number)
        if row is not None and row.token == lease.token:
            row.actor, row.token, row.until_s = None, None, 0.0

    def deliver(self, lease: Lease, payload: bytes) -> bool:
        self.fail("deliver")
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise DataError(f"more than {MAX_PAYLOAD_BYTES} bytes")
        if self._row_of(lease) is None:
            return False
        del self.data.rows[lease.work.number]
        self._append(lease.work.number, payload)
        self.fail("deliver")
        return True

    def _append(self, number: int | None, payload: bytes) -> None:
        data = self.data
        data.entries[data.next_id] = Entry(f"{data.epoch}-{data.next_id}", number, payload)
        data.next_id += 1

    def version(self) -> int | None:
        self.fail("version")
        return self.data.version

    def is_closed(self) -> bool:
        self.fail("is_closed")
        return self.data.closed

    def push(self, payload: bytes, *, max_entries: int) -> bool:
        self.fail("push")
        if len(self.data.entries) >= max_entries:
            return False
        self._append(None, payload)
        return True


def unreachable(call: str) -> None:
    """A `fail` of `MemoryLog`."""
    raise QueueError(f"{call}: the queue cannot be reached")
