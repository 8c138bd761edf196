"""`ludic status`: what the processes of a run do, how far the run is, and what its queue holds.
Changes nothing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import typer
from omegaconf import DictConfig

from ludic.errors import LudicError
from ludic.files.atomic import read_json
from ludic.files.checkpoints import STEP_NAME
from ludic.files.manifest import MANIFEST
from ludic.launch.state import SILENT_S, LaunchState, ProcessState, read_launch
from ludic.recipes.compose import read_yaml
from ludic.recipes.processes import QueueSection, find_queue
from ludic.runs.actors.queue import RUN_ID, open_queue
from ludic.runs.console import align
from ludic.runs.directory import check_is_run


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
    check_is_run(path)
    launch = read_launch(path)
    silent_s = None if launch is None or launch.exit_status is not None else max(0.0, now - launch.beat)
    complete = (file.parent for file in (path / "checkpoints").rglob(MANIFEST))  # the manifest is written last
    steps = (folder for folder in complete if STEP_NAME.fullmatch(folder.name))
    newest = max(steps, key=lambda folder: folder.stat().st_mtime, default=None)
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
    if status.silent_s is None:
        does = f"ended with status {launch.exit_status}"
    elif is_dead(status):
        does = f"silent for {format_duration(status.silent_s)}: it is dead; resume with `ludic train --resume {status.run}`"
    else:
        does = f"at work, seen {format_duration(status.silent_s)} ago"
    lines.append(f"supervisor: process {launch.pid} on {launch.host}, {launch.place}, {does}")
    rows: list[tuple[str, ...]] = [("NAME", "ROLE", "STATE", "FOR", "RESTARTS", "PROCESS", "LAST END")]
    rows += [_row(process, now) for process in launch.processes]
    return lines + align(rows)


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


QUEUE_S = 5.0
"""How long the server of a queue may take to answer."""


@dataclass(frozen=True)
class QueueStatus:
    """What the queue holds. Numbers are null if it does not answer."""

    error: str | None = None
    """Why it does not answer."""
    is_closed: bool | None = None
    """Whether the trainer is done."""
    entries: int | None = None
    """Entries that were delivered and are kept until a checkpoint has them."""
    bytes: int | None = None
    outstanding: int | None = None
    """Entries that are offered and not delivered."""
    leased: int | None = None
    """Of these, those that an actor has."""
    oldest_s: float | None = None
    """Seconds since the oldest of them was offered."""
    aside: int | None = None
    """Entries that could not be trained on, since the queue was made."""
    claimed: int | None = None
    """Leases that ran out and were taken over, since the queue was made."""
    actors: tuple[str, ...] = ()
    """Actors that have a lease."""


def read_queue(folder: Path) -> QueueStatus | None:
    """The queue of the run in `folder`; None for a run that has none, or has not made it yet."""
    if not (folder / RUN_ID).is_file():
        return None
    content = read_yaml(folder / "config.yaml")
    settings, place = content.get("queue"), content.get("place")
    has_actors = isinstance(place, DictConfig) and place.get("actors")
    if not isinstance(settings, DictConfig) or not (settings.get("url") or has_actors):
        return None
    section = QueueSection(**{item.name: settings[item.name] for item in fields(QueueSection) if item.name in settings})
    try:
        address = find_queue(section, folder)
        if "://" not in address and not Path(address).is_file():
            return None
        log = open_queue(section, folder, timeout_s=QUEUE_S)
    except LudicError as error:  # of LUDIC_QUEUE_URL, or a package that is not installed
        return QueueStatus(error=str(error))
    try:
        stats, outstanding, is_closed = log.stats(), log.outstanding(), log.is_closed()
    except LudicError as error:
        return QueueStatus(error=str(error))
    finally:
        log.disconnect()
    actors = sorted({work.actor for work in outstanding if work.actor is not None})
    return QueueStatus(is_closed=is_closed, **asdict(stats), actors=tuple(actors))


def describe_queue(queue: QueueStatus) -> str:
    """Example: `queue: 3 entries (1.2 MB) kept, 4 outstanding, of which 2 are leased (actor0,
    actor1), the oldest for 12 s; set aside 0, taken over 1`."""
    if queue.error is not None:
        return f"queue: {queue.error}"
    assert queue.bytes is not None
    assert queue.oldest_s is not None
    if queue.is_closed:
        return f"queue: closed, the trainer is done; set aside {queue.aside}, taken over {queue.claimed}"
    who = f" ({', '.join(queue.actors)})" if queue.actors else ""
    oldest = f", the oldest for {queue.oldest_s:.0f} s" if queue.outstanding else ""
    return (
        f"queue: {queue.entries} entries ({queue.bytes / 1e6:.1f} MB) kept, {queue.outstanding} outstanding, of which {queue.leased} are "
        f"leased{who}{oldest}; set aside {queue.aside}, taken over {queue.claimed}"
    )
