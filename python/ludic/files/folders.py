"""Folders that are written and deleted atomically.

A new folder is written under a temporary name, flushed to disk and renamed. A folder to delete is
renamed first, so that half of it never stands under its name. What a killed process leaves behind
has a name that begins with `.unfinished_`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished_"
_REPLACED = f"{UNFINISHED}replaced_"
"""The old folder while the new one takes its place: `restore_replaced` gives it back."""


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `target` when the block ends; an existing `target`
    is deleted. An error leaves `target` as it was."""
    target.parent.mkdir(parents=True, exist_ok=True)
    restore_replaced(target.parent)
    aside = unfinished_path(target)
    _erase(aside)
    aside.mkdir()
    try:
        yield aside
        _flush(aside)
        replaced = _move_aside(target, _REPLACED)
        os.replace(aside, target)
    except Exception:
        restore_replaced(target.parent)
        _erase(aside)
        raise
    _flush(target.parent)
    _erase(replaced)


def unfinished_path(target: Path) -> Path:
    """Where `replace_folder` puts the new folder until it is whole."""
    return target.with_name(f"{UNFINISHED}{target.name}")


def delete_folder(folder: Path) -> None:
    """Delete `folder` if it exists. Of a link, only the link is deleted."""
    _erase(_move_aside(folder, f"{UNFINISHED}going_"))


def restore_replaced(parent: Path) -> None:
    """Give folders their names back that a killed process moved aside before their replacements had
    them. Another process may do the same at the same time."""
    for replaced in parent.glob(f"{_REPLACED}*"):
        target = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        try:
            if not target.exists():
                os.replace(replaced, target)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
                raise


def clear_unfinished(parent: Path) -> None:
    """Delete what killed processes left in `parent`."""
    restore_replaced(parent)
    for leftover in parent.glob(f"{UNFINISHED}*"):
        _erase(leftover)


def _move_aside(folder: Path, prefix: str) -> Path:
    """Rename `folder`, if it exists, and return its new path."""
    aside = folder.with_name(f"{prefix}{folder.name}")
    _erase(aside)
    if folder.is_symlink() or folder.exists():
        os.replace(folder, aside)
    return aside


def _erase(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Write the folder and the files in it to disk, so that no rename becomes durable before its
    content."""
    for path in [*(entry for entry in folder.iterdir() if entry.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
