"""`ludic checkpoint`: its two commands. `cli.checkpoint`, which does the work, is imported when one
runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.user_errors import report_user_errors

checkpoints = typer.Typer(
    no_args_is_help=True,
    help="List the checkpoints of a run, or verify them: every file has the size and the hash that it was written with.",
)
_CheckpointPath = Annotated[Path, typer.Argument(metavar="PATH", help="A run, its folder of checkpoints, or one checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@checkpoints.command("list", help="Print path, time and size of each checkpoint. No file is read.")
def list_checkpoints(path: _CheckpointPath, json_only: AsJson = False) -> None:
    from ludic.cli.checkpoint import checkpoint_command

    with report_user_errors():
        code = checkpoint_command(path, verify=False, json_only=json_only)
    raise typer.Exit(code)


@checkpoints.command("verify", help="Read every file and compare it with the manifest. The exit status is 1 if one is damaged.")
def verify_checkpoints(path: _CheckpointPath, json_only: AsJson = False) -> None:
    from ludic.cli.checkpoint import checkpoint_command

    with report_user_errors():
        code = checkpoint_command(path, verify=True, json_only=json_only)
    raise typer.Exit(code)
