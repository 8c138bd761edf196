"""`ludic checkpoint`: its commands. `cli.checkpoint` and `checkpoint_export` are imported when one
runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.user_errors import report_user_errors

checkpoints = typer.Typer(
    no_args_is_help=True,
    help="List the checkpoints of a run, verify them (every file has the size and the hash that it was written with), or export one.",
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


@checkpoints.command(
    "export",
    help="Verify a checkpoint and write it, whole or in shards, as one folder that `from_pretrained` and vLLM open. A tensor at a "
    "time is in memory.",
)
def export_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run that has one.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, which must not exist.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default as stored.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into the model that they adapt.")] = False,
    base: Annotated[str | None, typer.Option(help="That model, if it is not where the adapters say.")] = None,
) -> None:
    from ludic.cli.checkpoint_export import export_command

    with report_user_errors():
        code = export_command(checkpoint, out, dtype=dtype, merge=merge, base=base)
    raise typer.Exit(code)
