"""`ludic view`: runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from ludic.cli.runs import OUTPUT, read_runs
from ludic.control_characters import escape_controls
from ludic.errors import CheckpointError, ConfigError
from ludic.files.atomic import write_text
from ludic.runs.reading import RunRecord, find_runs

MAX_RUNS = 24
"""More curves than this cannot be told apart."""
REPORT = "report.html"


def view_command(folders: Sequence[Path], *, out: Path | None, episodes: int) -> int:
    """Write the page and print its path. Without folders it is that of the newest run. Returns the
    exit status."""
    from ludic.runs.view.page import build_page

    records, damaged = read_runs(folders) if folders else _read_newest(OUTPUT)
    if damaged:
        raise CheckpointError("; ".join(damaged))
    if not records:
        raise ConfigError(f"there are no runs in {', '.join(map(str, folders))}; `ludic train` makes one")
    if len(records) > MAX_RUNS:
        raise ConfigError(f"{len(records)} runs are too many for one page, which shows {MAX_RUNS}; name those to compare")
    place = out or (records[0].path / REPORT if len(records) == 1 else Path(REPORT))
    if place.is_dir():
        raise ConfigError(f"{place} is a folder; name a file with --out {place / REPORT}")
    place.parent.mkdir(parents=True, exist_ok=True)
    page = build_page(records, episodes=episodes)
    write_text(place, page)
    runs = "1 run" if len(records) == 1 else f"{len(records)} runs"
    typer.echo(f"{place}: {runs}, {len(page.encode()) / 1e6:.1f} MB; open it in a browser: {place.resolve().as_uri()}")
    return 0


def _read_newest(folder: Path) -> tuple[list[RunRecord], list[str]]:
    """The run whose config.yaml was written last, of those that can be read: what is wrong with
    later ones is printed. If none can, what is wrong with each. Raises ConfigError if there is
    none."""
    runs = find_runs(folder) if folder.is_dir() else []
    if not runs:
        raise ConfigError(
            f"there are no runs in {folder}; name a run, as in `ludic view path/to/run`, or make one: `ludic train`"
        )
    unreadable: list[str] = []
    for run in reversed(runs):
        records, damaged = read_runs([run])
        if records:
            for line in unreadable:
                typer.secho(f"ludic: {escape_controls(line, keep='')}; the newest run before it is shown", err=True, fg="red")
            return records, []
        unreadable += damaged
    return [], unreadable
