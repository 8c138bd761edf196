"""Errors of ludic and of the machine as one line and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ludic.control_characters import escape_controls
from ludic.errors import ConfigError
from ludic.exit_codes import DO_NOT_RETRY, TRY_AGAIN
from ludic.rank_environment import RankEnvironment, read_rank_environment

FAILED, WRONG_INPUT, RETRY, STOP = 1, 2, TRY_AGAIN, DO_NOT_RETRY
"""Exit statuses: failed; a wrong setting, file or content; failed, and a restart may help; failed,
and a restart cannot help."""


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Turn errors of ludic and of the machine into one line and an exit status. Other exceptions
    are bugs and show their traceback. One of several ranks says which it is."""
    from ludic.cli.machine_faults import describe_machine_fault
    from ludic.errors import LudicError

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


def find_rank() -> RankEnvironment | None:
    """The rank of this process; None also where the environment contradicts itself, which is the
    error then."""
    try:
        return read_rank_environment()
    except ConfigError:
        return None


def exit_status(error: Exception) -> int:
    """The exit status of a command that ends with this error."""
    from ludic.errors import INPUT_ERRORS, OwnershipLost, QueueError, QueueRefused, RankError

    if isinstance(error, RankError):
        return error.exit_code
    if isinstance(error, (OwnershipLost, QueueRefused)):
        return STOP
    if isinstance(error, QueueError):
        return RETRY
    return WRONG_INPUT if isinstance(error, INPUT_ERRORS) else FAILED


def rank_exit_status(error: BaseException) -> int:
    """The exit status of all ranks for an error on one of them. For one of several ranks a launcher
    decides whether to start again, so that an error that comes back is `STOP`: wrong input, a disk,
    a checkpoint that cannot be read."""
    from ludic.cli.machine_faults import describe_machine_fault
    from ludic.errors import CheckpointError

    if isinstance(error, CheckpointError) or describe_machine_fault(error) is not None:
        return STOP
    status = exit_status(error) if isinstance(error, Exception) else FAILED
    return STOP if status == WRONG_INPUT else status
