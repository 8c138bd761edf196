"""`launch.json`: the processes of a run as its supervisor sees them, renewed every few seconds."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ludic.errors import CheckpointError
from ludic.files.atomic import encode_json, read_json

STATE = "launch.json"
BEAT_S = 5.0
"""How often the supervisor renews the file."""
SILENT_S = 30.0
"""A supervisor whose file is older is not at work any more."""


@dataclass
class ProcessState:
    """One process. Times are in seconds since 1970."""

    name: str
    role: str
    state: str = "waiting"
    """waiting (to be started), starting, running, ended (with status 0, or stopped), or given_up
    (not restarted)."""
    pid: int | None = None
    host: str | None = None
    log: str | None = None
    """The file, on `host`, to which it writes."""
    since: float | None = None
    """When this state began."""
    restarts: int = 0
    """How often it was restarted in this launch."""
    last_end: dict[str, Any] | None = None
    """The last end: `time`, `code`, `signal`, and `text` for people."""


@dataclass
class LaunchState:
    """All processes of a launch, and the supervisor."""

    pid: int
    host: str
    place: str
    """local or ray."""
    started: float
    beat: float
    """When the file was last written."""
    exit_status: int | None = None
    """The exit status of a launch that is over; null while it runs."""
    processes: list[ProcessState] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Replace the file atomically. It is not flushed to disk, since it describes only this
        launch."""
        aside = folder / f".{STATE}.unfinished"
        aside.write_text(encode_json(asdict(self)), encoding="utf-8")
        os.replace(aside, folder / STATE)


def read_launch(folder: Path) -> LaunchState | None:
    """The last launch of the run; None if it was never launched. Raises CheckpointError if the file
    is damaged."""
    path = folder / STATE
    if not path.is_file():
        return None
    content = read_json(path)
    try:
        processes = [ProcessState(**process) for process in content.pop("processes")]
        return LaunchState(**content, processes=processes)
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or of another version ({error}); delete it") from error
