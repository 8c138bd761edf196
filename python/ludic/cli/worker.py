"""`ludic worker`: one process of a run that has several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludic.cli.user_errors import report_user_errors

workers = typer.Typer(
    no_args_is_help=True,
    help="One process of a run with actors. `ludic train place.actors=2` starts them itself; on other machines you start them, "
    "with the run's folder on a shared file system.",
)
if TYPE_CHECKING:
    from ludic.cli.training_command import TrainingCommand
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


@workers.command("server", help="Serve the policy of a run until its trainer is done; the trainer gives it every version.")
def server(
    run: _Run,
    name: Annotated[str, typer.Option(help="Name of this server: server0, server1 and so on.")],
    host: Annotated[str, typer.Option(help="The address of this machine at which trainer and actors reach it.")] = "127.0.0.1",
) -> None:
    from ludic.runs.servers.worker import run_server_process

    with report_user_errors():
        code = run_server_process(run, name=name, host=host)
    raise typer.Exit(code)


@workers.command(
    "trainer", help="Train a run in this process or rank, from its newest checkpoint; its actors are started elsewhere."
)
def trainer(run: _Run) -> None:
    from ludic.cli.training_command import run_command

    with report_user_errors():
        code = run_command(_find_command(run), [], resume=run, json_only=False, print_config=False)
    raise typer.Exit(code)


def _find_command(run: Path) -> TrainingCommand[Any, Any]:
    """The command that began the run; `ludic train` says what is wrong with a folder without
    one."""
    from ludic.cli.train import DPOCommand, SFTCommand, TrainCommand, TrainRMCommand
    from ludic.runs.directory import RunDirectory

    folder = RunDirectory(run)
    name = folder.read_progress().command if folder.is_run else TrainCommand.directory.command
    commands: list[TrainingCommand[Any, Any]] = [
        TrainCommand(is_placed=True),
        SFTCommand(is_placed=True),
        TrainRMCommand(is_placed=True),
        DPOCommand(is_placed=True),
    ]
    return next((command for command in commands if command.directory.command == name), commands[0])
