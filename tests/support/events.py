"""The events of a run, for tests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, in order; none if it does not exist. Incomplete lines are skipped."""
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            yield event
