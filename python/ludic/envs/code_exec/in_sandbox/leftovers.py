"""The processes and files of programs: what they use, and how nothing of them is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Iterator

MEMORY_FIELDS = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
TICKS = os.sysconf("SC_CLK_TCK")
ALONE = os.getpid() == 1
"""Whether every other process here is a program's."""


def programs(first: int) -> list[int]:
    """The numbers of all processes of programs: everybody else here, or what descends from
    `first`."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if ALONE:
        return [number for number in numbers if number != 1]
    parents = {}
    for number in numbers:
        with contextlib.suppress(OSError):
            parents[number] = int(stat_fields(number)[1])
    own, found = os.getpid(), {first}
    while True:
        more = {number for number, parent in parents.items() if (parent in found or parent == own) and number not in found}
        if not more:
            return sorted(found - {own})
        found |= more


def stat_fields(number: int) -> list[bytes]:
    """The fields of /proc/N/stat from the third on: state, parent ..."""
    with open(f"/proc/{number}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2].split()


def usage_of_programs(first: int) -> tuple[int, int, float]:
    """Processes, bytes of memory (without files that are mapped), and seconds of processor time."""
    count, kilobytes, ticks = 0, 0, 0
    for number in programs(first):
        with contextlib.suppress(OSError, IndexError):
            fields = stat_fields(number)
            with open(f"/proc/{number}/status", "rb") as file:
                kilobytes += sum(map(int, MEMORY_FIELDS.findall(file.read())))
            count += 1
            ticks += sum(map(int, fields[11:15]))  # own time, and that of children that it waited for
    return count, kilobytes << 10, ticks / TICKS


def end_programs() -> float:
    """Kill every process of a program, and wait for it. Returns the processor time of orphans."""
    seconds = 0.0
    while True:
        if ALONE:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            for number in programs(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        try:
            _, _, used = os.wait4(-1, 0)
        except ChildProcessError:
            return seconds
        seconds += used.ru_utime + used.ru_stime


def delete_files(places: list[str]) -> bool:
    """Delete everything in the places; True if nothing is left. Links are not followed.

    A folder's folders are moved up before it is deleted, so that no depth is too deep.
    """
    for place in places:
        moved = itertools.count()
        while True:
            entries = list(os.scandir(place))
            with contextlib.suppress(OSError):
                for entry in entries:
                    delete(entry, place, moved)
            if not entries:
                break
            if {entry.name for entry in entries} == set(os.listdir(place)):
                return False
    return True


def delete(entry: os.DirEntry[str], place: str, moved: Iterator[int]) -> None:
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.path)
        return
    os.chmod(entry.path, 0o700)
    for inner in list(os.scandir(entry.path)):
        if inner.is_dir(follow_symlinks=False):
            os.chmod(inner.path, 0o700)  # a folder can only be moved by who may write to it
            name = next(name for name in (f"{place}/moved{number}" for number in moved) if not os.path.lexists(name))
            os.rename(inner.path, name)
        else:
            os.unlink(inner.path)
    os.rmdir(entry.path)
