"""The processes and files of programs: what they use, and how nothing of them is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Iterator

MEMORY_FIELDS = re.compile(rb"^(?:RssAnon|RssShmem|VmSwap|HugetlbPages):\s+(\d+) kB$", re.MULTILINE)
TICKS = os.sysconf("SC_CLK_TCK")
ALONE = os.getpid() == 1
"""Whether every other process here is a program's."""


def programs(first: int) -> list[int]:
    """The numbers of all processes of programs: everybody else here, or what descends from
    `first`."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if ALONE:
        return [number for number in numbers if number not in (1, os.getpid())]
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


def memory_of(number: int) -> int:
    """Bytes of a process, without files that are mapped. Where its first thread has ended and
    others run, only those have its memory."""
    return memory_in(f"/proc/{number}") or max(
        (memory_in(f"/proc/{number}/task/{task}") for task in os.listdir(f"/proc/{number}/task")), default=0
    )


def memory_in(folder: str) -> int:
    with contextlib.suppress(OSError), open(f"{folder}/status", "rb") as file:
        return sum(map(int, MEMORY_FIELDS.findall(file.read()))) << 10
    return 0


class Usage:
    """What a program and all that it started use, when it was looked at last."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.processes, self.memory = 0, 0
        """How many there are; bytes, without files that are mapped."""
        self.waits_for_processor = False
        self.ticks: dict[int, int] = {}
        """Of each process that was ever seen: nothing else counts processes whose parents ignore
        their end."""
        self.waited_for = 0

    @property
    def seconds(self) -> float:
        """Of processor time."""
        return max(sum(self.ticks.values()), self.waited_for) / TICKS

    def look(self) -> None:
        self.processes, self.memory, self.waited_for, self.waits_for_processor = 0, 0, 0, False
        for number in programs(self.first):
            with contextlib.suppress(OSError, IndexError):
                fields = stat_fields(number)
                self.memory += memory_of(number)
                self.processes += 1
                own, of_children = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
                self.ticks[number] = own
                self.waited_for += own + of_children
                self.waits_for_processor |= fields[0] == b"R"


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
    try:
        return all(delete_all_in(place) for place in places)
    except OSError:
        return False


def delete_all_in(place: str) -> bool:
    os.chmod(place, 0o700)
    moved = itertools.count()
    while True:
        entries = list(os.scandir(place))
        with contextlib.suppress(OSError):
            for entry in entries:
                delete(entry, place, moved)
        if not entries:
            os.utime(place, ns=(0, 0))  # a program could leave numbers in them
            return True
        if {entry.name for entry in entries} == set(os.listdir(place)):
            return False


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
