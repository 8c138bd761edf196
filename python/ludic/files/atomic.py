"""Text and JSON files that a reader sees whole: as they were, or as they are now."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
