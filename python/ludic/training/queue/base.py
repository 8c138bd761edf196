"""What a log of groups guarantees, whether it is a SQLite file or a Redis server.

A *group* is all answers to one prompt. It has a number: with P groups in a batch, group n is member
`n % P` of request batch `n // P`, so that its prompt and its seeds follow from the number alone.
Example for P = 4: group 9 is member 1 of batch 2. `ludic train` lets a number stand for a few
prompts, which are then sampled together (`runs.actors.worker`); P is the numbers in a batch.

A log has two parts:

    work      numbers that are to be played. The trainer offers them; an actor leases one, and
              delivers it before the lease runs out.
    entries   what was delivered, in the order of delivery. Entries are read by position and stay
              until they are forgotten, so that a restarted trainer reads the same entries in the
              same order.

A number's life:

    offer --> free --lease--> leased --deliver--> entry --read, train, save--> forgotten
               ^                |
               +-- give_back ---+   immediately
               +-- time is up --+   `attempt` becomes one more

**The trainer has the truth.** Its ledger of trained numbers is in its checkpoint (`arrivals`). A
log may lose all its data, and hold a number twice: the ledger refuses trained groups, and missing
groups are offered again (`source.QueueBatchSource.heal`).

**Every call is one transaction**: it happens as a whole or not at all, also if the process or the
server is killed in it. A call whose answer was lost can be repeated: it then does nothing more, or
says so. Calls block for at most the deadline of the log, and then raise `QueueError`; an
asynchronous caller runs them in a thread. A log can be used by several threads at the same time.

**One owner.** `claim` makes a trainer the owner. The calls that change the played or kept groups
take the owner's name and check it in their transaction: `OwnershipLost` if another trainer has
claimed the log since, `QueueDataLost` if it has no owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ludic.errors import DataError

DEFAULT_LEASE_S = 60.0
"""How long an actor may play without renewing its lease."""
DEFAULT_CLAIM_S = 30.0
"""How long a trainer owns a log without renewing its claim."""


@dataclass(frozen=True)
class Work:
    """A group that is to be played. Example: `Work(number=9, version=0)`."""

    number: int
    """Number of the group, from 0."""
    version: int
    """The policy version to sample it with: exactly this one, or with order `arrival` this one or a
    newer one."""
    attempt: int = 0
    """How many attempts failed: leases that ran out, and entries that were set aside."""


@dataclass(frozen=True)
class OutstandingWork:
    """A group that is offered and not delivered."""

    work: Work
    actor: str | None
    """Who has its lease; None if it is free, also because the lease ran out."""
    age_s: float
    """Seconds since it was offered first."""


@dataclass(frozen=True)
class Lease:
    """The right of one actor to play one group, for a time."""

    work: Work
    actor: str
    run: str
    """Id of the run that owns the log; an entry has it too."""
    token: str
    """Unique to this lease."""


@dataclass(frozen=True)
class Entry:
    """A delivered group, or pushed samples."""

    position: str
    """Where it is in the log. Positions are only compared by the log itself."""
    number: int | None
    """Number of the group; None for what was pushed."""
    payload: bytes


@dataclass(frozen=True)
class AsideEntry:
    """An entry that could not be trained on."""

    entry: Entry
    reason: str


@dataclass(frozen=True)
class QueueStats:
    """What a log holds now, and how often leases ran out."""

    entries: int
    """Entries that are not forgotten."""
    bytes: int
    """Size of their payloads."""
    outstanding: int
    """Groups that are offered and not delivered."""
    leased: int
    """Of these, groups that an actor has."""
    oldest_s: float
    """Seconds since the oldest of them was offered; 0 if there is none."""
    aside: int
    """Entries that were set aside since the log was made."""
    claimed: int
    """Leases that ran out and were taken over since the log was made."""


class GroupLog(Protocol):
    """A log of groups. The module's docstring has the picture and the rules of all calls."""

    # ---- the trainer ---------------------------------------------------------------------------

    def claim(self, owner: str, *, run: str, ttl_s: float = DEFAULT_CLAIM_S) -> None:
        """Make `owner` the owner for `ttl_s` seconds, and open the log if it was closed.

        An owner of the same run is replaced immediately: that trainer was restarted, and the lock
        of the run's folder keeps two from running. Another run's log raises OwnershipLost while its
        claim lasts; after that, and once it is closed, everything it holds is deleted.
        """
        ...

    def renew_claim(self, owner: str, *, ttl_s: float = DEFAULT_CLAIM_S) -> None:
        """Own the log for `ttl_s` seconds from now, also if the time was up already. Raises
        OwnershipLost or QueueDataLost."""
        ...

    def offer(self, owner: str, work: Sequence[Work]) -> int:
        """Make these groups available to actors; returns how many were not outstanding before.

        A number that is outstanding stays as it is, with its attempt and its lease, unless its
        version differs: then it becomes free with the new values, and deliveries under its old
        lease are refused. Entries are not looked at: the caller knows what it has read.
        """
        ...

    def withdraw(self, owner: str, numbers: Sequence[int]) -> None:
        """Take these numbers out of the work; deliveries of them are refused from now on. Numbers
        that are not outstanding are ignored."""
        ...

    def outstanding(self) -> list[OutstandingWork]:
        """All groups that are offered and not delivered, by number."""
        ...

    def read(self, after: str | None, *, limit: int = 16, timeout_s: float = 0.0) -> list[Entry]:
        """The next entries after this position, at most `limit`, in the order of delivery; None
        begins with the oldest that is kept. Waits up to `timeout_s` seconds for the first one and
        returns [] if none came. Changes nothing.

        A position of data that are gone begins with the oldest entry too, even where the numbering
        began anew.
        """
        ...

    def forget(self, owner: str, through: str) -> None:
        """Delete the entries up to and including this position. A position of data that are gone
        deletes nothing."""
        ...

    def announce(self, owner: str, version: int) -> None:
        """Say that policy version `version` can be sampled with. It may be smaller than before: the
        trainer went back to a checkpoint."""
        ...

    def set_aside(self, entry: Entry, reason: str) -> None:
        """Keep a copy of an entry that could not be trained on. The entry itself stays in the log,
        so that a restarted trainer meets it again, and does nothing if its position is among the
        copies. The last `KEPT_ASIDE` copies are kept, all are counted. A server that is
        full keeps the reason without the payload."""
        ...

    def aside(self) -> list[AsideEntry]:
        """The copies, oldest first."""
        ...

    def stats(self) -> QueueStats:
        """Numbers for metrics."""
        ...

    def close(self, owner: str) -> None:
        """The trainer is done: work and entries are deleted, and actors end. What was set aside
        stays."""
        ...

    # ---- actors --------------------------------------------------------------------------------

    def lease(self, actor: str, *, lease_s: float = DEFAULT_LEASE_S) -> Lease | None:
        """Take the smallest number that is free, for `lease_s` seconds. None if there is none,
        or if the log is closed. A number whose lease ran out has `attempt` one more."""
        ...

    def renew(self, lease: Lease, *, lease_s: float = DEFAULT_LEASE_S) -> bool:
        """Have the lease for `lease_s` seconds from now, also if its time was up and the group is
        free now; `attempt` stays. False if another actor has it, or if it is not outstanding as it
        was leased: it was delivered, withdrawn or offered with another version, or the data are
        gone.
        """
        ...

    def give_back(self, lease: Lease) -> None:
        """Make the group free now; `attempt` stays. Does nothing if the lease is not held."""
        ...

    def deliver(self, lease: Lease, payload: bytes) -> bool:
        """Append the entry and take the number out of the work, in one transaction. True if both
        happened.

        The first delivery wins, also under a lease that ran out or was taken over, as long as the
        group is outstanding with the lease's run and version. Otherwise False, and nothing changes:
        the group was delivered or withdrawn. A repeated call therefore returns False.
        """
        ...

    def version(self) -> int | None:
        """The version that was announced last; None if none was."""
        ...

    def is_closed(self) -> bool:
        """Whether the trainer is done. False for a log that has not been claimed yet."""
        ...

    # ---- producers without numbers -------------------------------------------------------------

    def push(self, payload: bytes, *, max_entries: int) -> bool:
        """Append an entry without a number. False, and nothing changes, if the log holds
        `max_entries` entries that are not forgotten: the producer waits and tries again. A repeated
        call may append twice; the payload says by whom and as which it was sent (`entries`)."""
        ...

    # ---- both ----------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Close this process's connections. A later call connects again."""
        ...


KEPT_ASIDE = 100
"""How many entries that were set aside a log keeps."""
MAX_PAYLOAD_BYTES = 16 * 2**20
"""The largest payload of an entry; `deliver` and `push` raise DataError for a larger one."""


def check_size(payload: bytes) -> None:
    """Raise DataError for a payload that no log takes."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise DataError(f"an entry of {len(payload)} bytes is larger than {MAX_PAYLOAD_BYTES}; use smaller groups")
