"""Folders that appear whole or not at all, and go at once.

A folder is written beside its place, flushed to disk and renamed. One that goes is renamed first,
so that half of it never stands under its name. What a killed process left lies beside it under a
name that begins with `.unfinished_`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished_"


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place at the end; one that is there is
    replaced. An error leaves `target` as it was."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{UNFINISHED}{target.name}")
    _erase(aside)
    aside.mkdir()
    try:
        yield aside
        flush(aside)
        replaced = _out_of_the_way(target)
        os.replace(aside, target)
    except Exception:
        _erase(aside)
        raise
    flush(target.parent)
    _erase(replaced)


def delete_folder(folder: Path) -> None:
    """Delete `folder` if it is there. Of a link the link goes, and what it points at stays."""
    _erase(_out_of_the_way(folder))


def clear_unfinished(parent: Path) -> None:
    """Delete what a killed process left in `parent`."""
    for leftover in parent.glob(f"{UNFINISHED}*"):
        _erase(leftover)


def _out_of_the_way(folder: Path) -> Path:
    """Where `folder` now is, if it was there."""
    going = folder.with_name(f"{UNFINISHED}going_{folder.name}")
    _erase(going)
    if folder.is_symlink() or folder.exists():
        os.replace(folder, going)
    return going


def _erase(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def flush(folder: Path) -> None:
    """Bring the folder and the files in it to disk, so that a rename never comes before its
    content."""
    for path in [*(entry for entry in folder.iterdir() if entry.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
