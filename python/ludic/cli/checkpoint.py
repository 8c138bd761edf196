"""`ludic checkpoint list` and `ludic checkpoint verify`: which checkpoints a run has, and whether
they are what was written."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from ludic.errors import CheckpointError
from ludic.files.atomic import read_json
from ludic.files.checkpoints import BEST, STEP_NAME, find_checkpoint_faults
from ludic.files.manifest import MANIFEST


@dataclass(frozen=True)
class CheckpointLine:
    """What is printed of a checkpoint."""

    path: str
    saved: str
    """Local time."""
    size: int
    """Bytes of all files."""
    state: str
    """verified, damaged, unverifiable (an older version wrote no manifest), or listed: not read."""
    faults: list[str]
    """What is damaged, one phrase for each file."""
    layout: str = "full"
    """full, or shallow: for resuming alone."""


def checkpoint_command(path: Path, *, verify: bool, json_only: bool) -> int:
    """Print the checkpoints in `path`, which is a run, a folder of checkpoints, or one checkpoint.
    Returns the exit status: 1 if one is damaged."""
    lines = [_describe(folder, verify=verify) for folder in find_checkpoints(path)]
    if json_only:
        typer.echo(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        for line in lines:
            shown = f": {', '.join(line.faults)}" if line.faults else ""
            state = "" if line.state == "listed" else f"  {line.state}{shown}"
            layout = "  shallow" if line.layout == "shallow" else ""
            typer.secho(f"{line.path}  {line.saved}  {_readable(line.size)}{layout}{state}", fg="red" if line.faults else None)
    return int(any(line.faults for line in lines))


def find_checkpoints(path: Path) -> list[Path]:
    """`path` if it is a checkpoint, else all checkpoints in it, by phase and step, and the weights
    of the best evaluation (`best`). Raises CheckpointError if there are none."""
    if (path / MANIFEST).is_file() or (path.is_dir() and STEP_NAME.fullmatch(path.name)):
        return [path]
    steps = [folder for folder in path.rglob("step_*") if folder.is_dir() and STEP_NAME.fullmatch(folder.name)]
    folders = sorted([*steps, *(manifest.parent for manifest in path.rglob(f"{BEST}/{MANIFEST}"))])
    if not folders:
        raise CheckpointError(f"there is no checkpoint (step_NNNNNN) in {path}; name a run, its checkpoints, or one of them")
    return folders


def _describe(folder: Path, *, verify: bool) -> CheckpointLine:
    faults = find_checkpoint_faults(folder) if verify else []
    unverifiable = not (folder / MANIFEST).exists()
    state = "damaged" if faults else "unverifiable" if unverifiable else "verified" if verify else "listed"
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.stat().st_mtime))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return CheckpointLine(str(folder), saved, size, state, faults, _find_layout(folder))


def _find_layout(folder: Path) -> str:
    """The layout that the manifest names, damaged or not."""
    try:
        return str(read_json(folder / MANIFEST).get("layout", "full"))
    except (CheckpointError, OSError):
        return "full"


def _readable(size: int) -> str:
    """Example: 1,234,567 is `1.2 MB`."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
