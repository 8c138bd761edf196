"""Whether the process of another rank on this machine still runs."""

from __future__ import annotations

import os
from pathlib import Path

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
