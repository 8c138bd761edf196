"""Files and folders that a reader sees whole: as they were, or as they are now.

A new folder is written under a temporary name, flushed to disk and renamed. A folder to delete is
renamed first, so that half of it never stands under its name. What a killed process leaves behind
has a name that begins with `.unfinished_`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ludic.errors import CheckpointError, DataError
from ludic.files.json_values import parse_json


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace the file atomically: write a temporary file, flush it to disk, rename it. `private`:
    only this user can ever read it."""
    aside = name_aside(path)
    with open(aside, "w", encoding="utf-8", opener=_open_private if private else None) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # it may be left from a killed process
    return descriptor


def name_aside(path: Path) -> Path:
    """Where the next content of a file is written before it takes its place."""
    return path.with_name(f".{path.name}.unfinished")


def clear_unfinished_files(folder: Path) -> None:
    """Delete the next contents that killed processes left in `folder`. No other process may write
    there now."""
    for leftover in folder.glob(".*.unfinished"):
        leftover.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file by `encode_json(content)`. Raises CheckpointError for what JSON has no form
    for."""
    try:
        text = encode_json(content)
    except TypeError as error:
        raise CheckpointError(f"{path.name} must hold plain JSON values: {error}; a state_dict must be made of those") from error
    write_text(path, text)


def encode_json(content: Mapping[str, Any]) -> str:
    """The text of a JSON file, indented."""
    return json.dumps(content, indent=2, allow_nan=True) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises CheckpointError for anything else."""
    try:
        content = parse_json(path.read_bytes(), str(path))
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content


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
