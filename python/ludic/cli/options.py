"""What the commands share: options, and errors as one line and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ludic.errors import LudicError, escape_controls
from ludic.runs.exit_status import describe_machine_fault, exit_status, find_rank, rank_exit_status

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A built-in recipe or a YAML file, and fields to set."),
]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of the run to resume.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate; short for trainer.lr=RATE.")]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print only summary.json on standard output.")]
PrintConfig = Annotated[bool, typer.Option(help="Print the resolved settings as YAML and stop.")]


def read_settings(arguments: list[str] | None, lr: float | None) -> list[str]:
    """The settings of a command line, with the one that `--lr` is short for. Raises ConfigError for
    a flag among them, which names the setting."""
    settings = list(arguments or ())
    if any(argument.startswith("-") for argument in settings):
        from ludic.recipes.compose import list_settings
        from ludic.recipes.overrides import refuse_flags

        refuse_flags(settings, list_settings())
    return settings if lr is None else [*settings, f"trainer.lr={lr}"]


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Turn errors of ludic and of the machine into one line and an exit status. Other exceptions
    are bugs and show their traceback. One of several ranks says which it is."""
    try:
        yield
    except Exception as error:
        line = str(error) if isinstance(error, LudicError) else describe_machine_fault(error)
        if line is None:
            raise
        environment = find_rank()
        who = "" if environment is None else f"rank {environment.rank} of {environment.world_size}: "
        typer.secho(f"ludic: {who}{escape_controls(line)}", err=True, fg="red")
        raise typer.Exit(exit_status(error) if environment is None else rank_exit_status(error)) from error
