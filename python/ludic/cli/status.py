"""`ludic status`: what the processes of a run do, how far the run is, and what its queue holds.
Changes nothing."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from ludic.cli.console import align
from ludic.cli.queue_status import QueueStatus, describe_queue, read_queue
from ludic.errors import CheckpointError
from ludic.files.atomic import read_json
from ludic.files.manifest import MANIFEST
from ludic.launch.state import SILENT_S, LaunchState, ProcessState, read_launch

_STEP = re.compile(r"step_\d+")


@dataclass(frozen=True)
class RunStatus:
    """What `ludic status` prints."""

    run: str
    phase: str
    """The phase that is played; done at the end."""
    step: int | None
    """The last step in metrics.jsonl."""
    launch: LaunchState | None
    """The processes; None for a run of one process."""
    silent_s: float | None
    """Seconds since the supervisor was last at work; None without one, and after its end."""
    checkpoint: str | None
    """The newest complete checkpoint."""
    checkpoint_age_s: float | None
    queue: QueueStatus | None = None
    """What the queue holds; None for a run without actors."""


def status_command(path: Path, *, json_only: bool) -> int:
    """Print the state of a run. Returns the exit status: 1 if its supervisor has died."""
    status = read_status(path, now=time.time())
    if json_only:
        typer.echo(json.dumps(asdict(status), indent=2))
    else:
        for line in describe(status, now=time.time()):
            typer.echo(line)
    return int(is_dead(status))


def read_status(path: Path, *, now: float) -> RunStatus:
    """Collect the state of the run in the folder `path`. Raises CheckpointError if it is no run."""
    if not (path / "progress.json").is_file():
        raise CheckpointError(f"{path} is not the folder of a run: it has no progress.json; name a folder such as runs/NAME")
    launch = read_launch(path)
    silent_s = None if launch is None or launch.exit_status is not None else max(0.0, now - launch.beat)
    newest = max(_list_checkpoints(path), key=lambda folder: folder.stat().st_mtime, default=None)
    return RunStatus(
        run=str(path),
        phase=str(read_json(path / "progress.json").get("phase", "unknown")),
        step=_read_last_step(path / "metrics.jsonl"),
        launch=launch,
        silent_s=silent_s,
        checkpoint=None if newest is None else str(newest),
        checkpoint_age_s=None if newest is None else max(0.0, now - newest.stat().st_mtime),
        queue=read_queue(path),
    )


def is_dead(status: RunStatus) -> bool:
    """Whether the supervisor ended without a word: it was killed, or its machine is gone."""
    return status.silent_s is not None and status.silent_s > SILENT_S


def describe(status: RunStatus, *, now: float) -> list[str]:
    """The lines for people."""
    step = "" if status.step is None else f", step {status.step}"
    lines = [f"{status.run}: {status.phase}{step}"]
    if status.checkpoint is not None and status.checkpoint_age_s is not None:
        lines.append(f"checkpoint: {status.checkpoint}, {format_duration(status.checkpoint_age_s)} ago")
    if status.queue is not None:
        lines.append(describe_queue(status.queue))
    if status.launch is None:
        return [*lines, "processes: one, without a supervisor"]
    launch = status.launch
    lines.append(f"supervisor: process {launch.pid} on {launch.host}, {launch.place}, {_describe_supervisor(status)}")
    rows: list[tuple[str, ...]] = [("NAME", "ROLE", "STATE", "FOR", "RESTARTS", "PROCESS", "LAST END")]
    rows += [_row(process, now) for process in launch.processes]
    return lines + align(rows)


def _describe_supervisor(status: RunStatus) -> str:
    assert status.launch is not None
    if status.silent_s is None:
        return f"ended with status {status.launch.exit_status}"
    if is_dead(status):
        return f"silent for {format_duration(status.silent_s)}: it is dead; resume with `ludic train --resume {status.run}`"
    return f"at work, seen {format_duration(status.silent_s)} ago"


def _row(process: ProcessState, now: float) -> tuple[str, ...]:
    age = "" if process.since is None else format_duration(max(0.0, now - process.since))
    where = "" if process.pid is None else f"{process.pid} on {process.host}"
    end = "" if process.last_end is None else str(process.last_end["text"])
    return process.name, process.role, process.state, age, str(process.restarts), where, end


def format_duration(seconds: float) -> str:
    """Examples: `12 s`, `5 min`, `3.5 h`, `2.1 d`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def _list_checkpoints(path: Path) -> list[Path]:
    """Complete checkpoints: their manifest is written last."""
    return [file.parent for file in (path / "checkpoints").rglob(MANIFEST) if _STEP.fullmatch(file.parent.name)]


def _read_last_step(metrics: Path) -> int | None:
    """The step of the last complete line."""
    if not metrics.is_file():
        return None
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - (1 << 16)))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            record: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            return int(record["step"])
    return None
