"""Files of JSON, one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ludic.errors import DataError


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of every line that is not blank. Raises DataError for a file that is not there, or a line that is no object."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"data file {path} does not exist")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _object(line, f"{path}:{number}")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}; every line must be one JSON object")
    return row
