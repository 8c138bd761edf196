"""`ludic runs`: the runs in a folder, one a line, with their results and the settings in which they
differ.

`ludic view`: runs as one HTML file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import typer

from ludic.cli.status import format_duration
from ludic.errors import CheckpointError, ConfigError, escape_controls
from ludic.files.atomic import write_text
from ludic.files.json_values import make_encodable
from ludic.runs.console import align
from ludic.runs.reading import PLACES, RunRecord, find_runs, list_differences, read_run

OUTPUT = Path("runs")
SHOWN_SETTINGS = 8
"""Differing settings in the table; `--json` has all."""
_COLUMNS = ("RUN", "STATUS", "STEPS", "ALGORITHM", "HELD OUT", "BEFORE", "AFTER", "TIME")


def runs_command(folders: Sequence[Path], *, json_only: bool) -> int:
    """Print the runs in the folders. Returns the exit status."""
    records, damaged = read_runs(folders or [OUTPUT])
    if json_only:
        differences = list_differences(records)
        content = [_describe(record, differences, place) for place, record in enumerate(records)]
        typer.echo(json.dumps(make_encodable(content), indent=2, allow_nan=False))
    elif records:
        show(records)
    else:
        typer.echo(f"There are no runs in {', '.join(map(str, folders or [OUTPUT]))}; `ludic train` makes one")
    for line in damaged:
        typer.secho(f"ludic: {_shown(line)}", err=True, fg="red")
    return int(bool(damaged))


def read_runs(folders: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
    """The runs, each once, and one line for each run that cannot be read."""
    paths = {path.resolve(): path for folder in folders for path in find_runs(folder)}
    records, damaged = [], []
    for path in paths.values():
        try:
            records.append(read_run(path))
        except (CheckpointError, ConfigError, OSError) as error:
            damaged.append(str(error))
    return records, damaged


def show(records: Sequence[RunRecord]) -> None:
    """Print tables: the runs, and for each command the settings in which its runs differ. Lines are
    as long as they need to be, so that they can be searched and piped."""
    typer.echo("\n".join(align([_COLUMNS, *(list(map(_shown, _make_row(record))) for record in records)])))
    for record in records:
        if record.failed is not None:
            typer.echo(_shown(f"{record.name} failed: {next(iter(record.failed.splitlines()), '')}"))
    _show_seeds(records)
    commands = dict.fromkeys(record.command for record in records)
    for command in commands:
        _show_settings([record for record in records if record.command == command], command if len(commands) > 1 else None)


def _show_seeds(records: Sequence[RunRecord]) -> None:
    """Mean and sample standard deviation over finished runs that differ by their seed alone."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        settings = {key: value for key, value in record.settings.items() if key not in ("seed", *PLACES)}
        if record.held_out is not None and record.held_out[2] is not None:
            groups.setdefault(json.dumps([record.command, record.held_out[0], settings], sort_keys=True), []).append(record)
    rows = []
    for of in groups.values():
        if len({record.settings.get("seed") for record in of}) > 1:
            names, before, after = zip(*(record.held_out for record in of if record.held_out), strict=True)
            rows.append([", ".join(record.name for record in of), names[0], _format_spread(before), _format_spread(after)])
    if rows:
        typer.echo("\nOver seeds: mean and standard deviation")
        typer.echo("\n".join(align([list(map(_shown, cells)) for cells in [["RUNS", "HELD OUT", "BEFORE", "AFTER"], *rows]])))


def _show_settings(records: Sequence[RunRecord], command: str | None) -> None:
    """The settings in which runs of one command differ; runs of two commands have different
    settings anyway. `command`: its name, if there are runs of others."""
    differences = list_differences(records)
    if not differences:
        return
    shown = dict(list(differences.items())[:SHOWN_SETTINGS])
    typer.echo("\nSettings that differ" + ("" if command is None else f" between the runs of `ludic {command}`"))
    rows = [[record.name, *(_format_setting(row[place]) for row in shown.values())] for place, record in enumerate(records)]
    typer.echo("\n".join(align([list(map(_shown, cells)) for cells in [["RUN", *shown], *rows]])))
    if len(differences) > len(shown):
        typer.echo(f"and {len(differences) - len(shown)} more; --json and `ludic view` have all")


def _shown(text: str) -> str:
    """A cell or a line: what a run was named or raised cannot change the terminal."""
    return escape_controls(text, keep="")


def _make_row(record: RunRecord) -> list[str]:
    name, before, after = record.held_out or ("", None, None)
    steps = f"{record.steps}" if record.steps_asked in (None, record.steps) else f"{record.steps} of {record.steps_asked}"
    low, high = (record.intervals.get("after", {}).get(name) or [None, None])[:2]
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    rates = ["" if before is None else f"{before:.3f}", "" if after is None else f"{after:.3f}{interval}"]
    return [record.name, record.status, steps, record.algorithm or "", name, *rates, format_duration(record.wall_s)]


def _describe(record: RunRecord, differences: dict[str, list[Any]], place: int) -> dict[str, Any]:
    return {
        "run": str(record.path),
        "command": record.command,
        "status": record.status,
        "failed": record.failed,
        "algorithm": record.algorithm,
        "model": record.model,
        "steps": record.steps,
        "steps_asked": record.steps_asked,
        "before": dict(record.before),
        "after": dict(record.after),
        "intervals": record.intervals,
        "wall_s": round(record.wall_s, 2),
        "settings": {key: row[place] for key, row in differences.items()},
    }


def _format_spread(values: Sequence[float | None]) -> str:
    """Example: `0.979 ± 0.004`; empty unless all runs have a value."""
    numbers = [value for value in values if value is not None]
    return "" if len(numbers) < len(values) else f"{mean(numbers):.3f} ± {stdev(numbers):.3f}"


def _format_setting(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


MAX_RUNS = 24
"""More curves than this cannot be told apart."""
REPORT = "report.html"


def view_command(folders: Sequence[Path], *, out: Path | None, episodes: int) -> int:
    """Write the page and print its path. Without folders it shows the newest run. Returns the
    exit status."""
    from ludic.runs.view.page import build_page

    records, damaged = read_runs(folders) if folders else _read_newest(OUTPUT)
    if damaged:
        raise CheckpointError("; ".join(damaged))
    if not records:
        raise ConfigError(f"there are no runs in {', '.join(map(str, folders or [OUTPUT]))}; `ludic train` makes one")
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
    """The readable run whose config.yaml was written last. The faults of unreadable later ones are
    printed, or of all if none can be read."""
    runs = find_runs(folder) if folder.is_dir() else []
    unreadable: list[str] = []
    for run in reversed(runs):
        records, damaged = read_runs([run])
        if records:
            for line in unreadable:
                typer.secho(f"ludic: {escape_controls(line, keep='')}; the newest run before it is shown", err=True, fg="red")
            return records, []
        unreadable += damaged
    return [], unreadable
