"""Errors of ludic and of the machine as one line and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

FAILED, WRONG_INPUT, RETRY, STOP = 1, 2, 75, 78
"""Exit statuses: failed; a wrong setting, file or content; failed, and a restart may help; failed,
and a restart cannot help."""


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Turn errors of ludic and of the machine into one line and an exit status. Other exceptions
    are bugs and show their traceback."""
    from ludic.cli.machine_faults import describe_machine_fault
    from ludic.errors import LudicError

    try:
        yield
    except LudicError as error:
        typer.secho(f"ludic: {error}", err=True, fg="red")
        raise typer.Exit(exit_status(error)) from error
    except Exception as error:
        line = describe_machine_fault(error)
        if line is None:
            raise
        typer.secho(f"ludic: {line}", err=True, fg="red")
        raise typer.Exit(FAILED) from error


def exit_status(error: Exception) -> int:
    """The exit status of a command that ends with this error."""
    from ludic.errors import (
        ConfigError,
        ConfigTypeError,
        DataError,
        DataKeyError,
        DataTypeError,
        MissingExtraError,
        OwnershipLost,
        QueueError,
    )

    if isinstance(error, OwnershipLost):
        return STOP
    if isinstance(error, QueueError):
        return RETRY
    is_input = isinstance(error, (ConfigError, ConfigTypeError, DataError, DataKeyError, DataTypeError, MissingExtraError))
    return WRONG_INPUT if is_input else FAILED
