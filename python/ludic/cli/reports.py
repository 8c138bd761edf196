"""The commands that look back at runs: `ludic runs` and `ludic view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.checkpoint_commands import AsJson
from ludic.cli.user_errors import report_user_errors

RUNS_HELP = """List runs: how each ended, its steps, held-out rates before and after, its time, and the settings in which they differ.

**Examples**

- `ludic runs` lists the runs in `runs/`
- `ludic runs runs/a runs/b` compares two of them
- `ludic runs other/folder --json` has every rate, interval and differing setting
"""

VIEW_HELP = """Write one HTML file that shows runs: curves laid over each other, held-out rates with intervals, settings side by side,
sampled episodes turn by turn with their tokens, and a reward model's margins and calibration. It needs no network.

**Examples**

- `ludic view` shows the newest run in `runs/`
- `ludic view runs/NAME` writes `runs/NAME/report.html`
- `ludic view runs/a runs/b -o compare.html` lays two runs over each other
- `ludic view runs` shows all runs in the folder
"""


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Runs, or folders with runs. Default: runs.")
    ] = None,
    json_only: AsJson = False,
) -> None:
    from ludic.cli.runs import runs_command

    with report_user_errors():
        code = runs_command(folders or [], json_only=json_only)
    raise typer.Exit(code)


def view(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Runs, or folders with runs. Default: the newest in runs.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Default: report.html in the run's folder, or here for several runs."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of each run to show at most.")] = 10_000,
) -> None:
    from ludic.cli.view import view_command

    with report_user_errors():
        code = view_command(folders or [], out=out, episodes=episodes)
    raise typer.Exit(code)
