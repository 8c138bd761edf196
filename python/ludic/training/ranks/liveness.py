"""Which other ranks are alive, so that no rank waits at the store for one that was killed.

A rank on this machine is alive as long as its process is. Of one on another machine, only the signs
tell that its watchdog gives each second. Their absence counts only once a stop was requested: a
launcher that asks all ranks to stop because one has ended kills them if they do not. Before that,
the deadline of the wait counts, since a process may be too busy to give signs.
"""

from __future__ import annotations

import os
from pathlib import Path

from ludic.errors import shorten_names
from ludic.training.ranks.rank_store import RankStore

LEFT = "left"
"""Key of a rank that needs the store no more."""
LOOK_S = 1.0
"""How often a wait looks at the others; less often for more than `RANKS_PER_LOOK` of them."""
RANKS_PER_LOOK = 64
QUIET_S = 10.0
"""How long a rank that gave signs of life gives none before it counts as lost."""


class Liveness:
    """The lives of the other ranks, seen from one."""

    def __init__(self, store: RankStore, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._machine = find_machine()
        self._signs = 0
        self._heard: dict[int, tuple[str, float]] = {}
        """Rank -> its last sign, and when it was first seen."""
        self._look_at = 0.0

    def announce(self) -> None:
        """Tell the other ranks on this machine which process this is."""
        begin = find_begin(os.getpid())
        if self._machine is not None and begin is not None:
            self._store.append(self._processes_key, f"{self._rank} {os.getpid()} {begin}\n")

    @property
    def _processes_key(self) -> str:
        return f"processes/{self._machine}"

    def give_sign(self) -> None:
        """A sign of life of this rank."""
        self._signs += 1
        self._store.set(f"alive/{self._rank}", str(self._signs))

    def look(self, now: float, *, stopping: bool) -> str | None:
        """The message to the others if a rank is lost, else None, also if the last look was just
        before `now` (seconds). `stopping`: whether a stop was requested."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S * max(1.0, self._world_size / RANKS_PER_LOOK)
        return self.describe_ended() or (self._describe_quiet(now) if stopping else None)

    def describe_ended(self) -> str | None:
        """Names the ranks on this machine whose processes have ended though they have not left."""
        ended = sorted(rank for rank, (pid, begin) in self._find_processes().items() if has_ended(pid, begin))
        ended = [rank for rank in ended if not self._store.has(f"{LEFT}/{rank}")]
        if not ended:
            return None
        return (
            f"{name_ranks(ended)} of {self._world_size} ended without a word: killed from outside, for lack of memory, or as its own "
            "output says"
        )

    def _find_processes(self) -> dict[int, tuple[int, int]]:
        """Rank -> (id of its process, when that began), of the ranks on this machine."""
        if self._machine is None or not self._store.has(self._processes_key):
            return {}
        lines = [map(int, line.split()) for line in self._store.get(self._processes_key).splitlines()]
        return {rank: (pid, begin) for rank, pid, begin in lines}

    def _describe_quiet(self, now: float) -> str | None:
        """Names the ranks elsewhere whose last sign of life has been the same for `QUIET_S`. Those
        that never gave one, and those that have left, do not count."""
        quiet, here = [], {self._rank, *self._find_processes()}
        for rank in range(self._world_size):
            if rank in here or not self._store.has(f"alive/{rank}"):
                continue
            sign = self._store.get(f"alive/{rank}")
            before, since = self._heard.get(rank, (None, now))
            self._heard[rank] = (sign, now if sign != before else since)
            if now - self._heard[rank][1] > QUIET_S and not self._store.has(f"{LEFT}/{rank}"):
                quiet.append(rank)
        if not quiet:
            return None
        return f"{name_ranks(quiet)} of {self._world_size} gave no sign of life for {QUIET_S:g} s after the run was asked to stop"


def name_ranks(ranks: list[int]) -> str:
    """Example: [1] is "rank 1", [1, 3] is "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {shorten_names(ranks)}"


_BOOT = Path("/proc/sys/kernel/random/boot_id")


def find_machine() -> str | None:
    """This start of this machine, and the namespace in which process ids are counted. None where
    the system does not tell (no Linux)."""
    try:
        return f"{_BOOT.read_text(encoding='utf-8').strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def find_begin(pid: int) -> int | None:
    """When the process of this id began, in ticks since the start of the machine; None if there is
    none, or it has ended and is still to be waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *facts = stat.rpartition(")")[2].split()  # the name before it, in brackets, may have spaces
    return None if state in ("Z", "X") else int(facts[18])


def has_ended(pid: int, begin: int) -> bool:
    """Whether the process of this machine that had the id and began then (`find_begin`) has
    ended."""
    return find_begin(pid) != begin
