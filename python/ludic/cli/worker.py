"""`ludic worker`: one process of a run that has several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.user_errors import report_user_errors

workers = typer.Typer(
    no_args_is_help=True,
    help="One process of a run with actors. `ludic train place.actors=2` starts them itself; on other machines you start them, "
    "with the run's folder on a shared file system.",
)
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.")]


@workers.command(
    "actor", help="Sample for the trainer of a run until it is done. Several may, on any machine that has the folder."
)
def actor(
    run: _Run,
    name: Annotated[
        str | None, typer.Option(help="Name of this actor, of no other one. Default: machine and process id.")
    ] = None,
) -> None:
    from ludic.runs.actors.worker import run_actor_process

    with report_user_errors():
        code = run_actor_process(run, name=name)
    raise typer.Exit(code)


@workers.command(
    "trainer", help="Train a run in this process alone, from its newest checkpoint; its actors are started elsewhere."
)
def trainer(run: _Run) -> None:
    from ludic.cli.train import train_command

    with report_user_errors():
        code = train_command([], resume=run, json_only=False, print_config=False)
    raise typer.Exit(code)
