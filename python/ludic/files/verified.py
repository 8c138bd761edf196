"""Remembers which folders were verified, so that none is read twice while its files stay as they
are."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ludic.files.manifest import MANIFEST

SETTLED_NS = 2 * 10**9
"""A file that was changed so recently may change again at the same time, as the clock of a file
system counts."""
_Stamps = tuple[tuple[str, int, int, int, int], ...]


class VerifiedFolders:
    """Folders with a manifest in which no fault was found."""

    def __init__(self) -> None:
        self._stamps: dict[Path, _Stamps] = {}

    def find_faults(self, folder: Path, verify: Callable[[Path], list[str]]) -> list[str]:
        """`verify(folder)`, which reads every byte and returns what is damaged; [] without reading
        if it returned that before, and every file has the size, times and inode of then."""
        before = _stamp_files(folder)
        if self._stamps.get(folder) == before:
            return []
        faults = verify(folder)
        is_settled = all(max(times) < time.time_ns() - SETTLED_NS for _, _, *times, _ in before)
        if not faults and is_settled and (folder / MANIFEST).exists():
            self._stamps[folder] = before
        return faults


def _stamp_files(folder: Path) -> _Stamps:
    """Name, size, times of the last write and of the last change in ns, and inode of each file. No
    file is read. A program can put the first of these times back, but not the second."""
    found = ((str(path.relative_to(folder)), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return tuple((name, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino) for name, facts in found)
