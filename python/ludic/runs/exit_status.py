"""The exit status of an error, and errors of the machine as one line.

Errors of the machine are a full disk, a folder that is not writable, a GPU out of memory. Any other
exception is a bug and shows its traceback.
"""

from __future__ import annotations

import errno
import os
import re
import traceback

from ludic.errors import (
    DO_NOT_RETRY,
    INPUT_ERRORS,
    TRY_AGAIN,
    CheckpointError,
    ConfigError,
    OwnershipLost,
    QueueError,
    QueueRefused,
    RankError,
)
from ludic.launch.rank_environment import RankEnvironment, read_rank_environment

FAILED, WRONG_INPUT, RETRY, STOP = 1, 2, TRY_AGAIN, DO_NOT_RETRY
"""Exit statuses: failed; a wrong setting, file or content; failed, and a restart may help; failed,
and a restart cannot help."""


def find_rank() -> RankEnvironment | None:
    """The rank of this process; None also where the environment contradicts itself, which is the
    error then."""
    try:
        return read_rank_environment()
    except ConfigError:
        return None


def exit_status(error: Exception) -> int:
    """The exit status of a command that ends with this error."""
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
    if isinstance(error, CheckpointError) or describe_machine_fault(error) is not None:
        return STOP
    status = exit_status(error) if isinstance(error, Exception) else FAILED
    return STOP if status == WRONG_INPUT else status


_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or set output=FOLDER on another",
    errno.EDQUOT: "the disk quota is used up; free some space or set output=FOLDER elsewhere",
    errno.EFBIG: "the file is larger than the limit; raise it (ulimit -f)",
    errno.EROFS: "the file system is read-only; set output=FOLDER elsewhere",
    errno.EACCES: "permission is denied; set output=FOLDER where you may write",
    errno.EPERM: "it is not permitted; set output=FOLDER where you may write",
    errno.ENOTDIR: "a part of this path is a file and not a folder",
    errno.EISDIR: "this is a folder, where a file is needed",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter name=",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.EIO: "the disk reported a read or write error",
}


def describe_machine_fault(error: BaseException) -> str | None:
    """The line to show instead of a traceback; None if this is no known error of the machine."""
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        place = next((str(name) for name in (error.filename, error.filename2) if name is not None), None)
        return _format_fault(error.errno, place)
    if isinstance(error, FileExistsError) and error.filename is not None:
        return f"{error.filename} exists already and is a file, but a folder is needed"
    if type(error).__module__.startswith("safetensors"):
        number = re.search(r"\(os error (\d+)\)", str(error))
        return _format_fault(int(number[1]), None) if number is not None and int(number[1]) in _REMEDIES else None
    if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch"):
        return f"{str(error).splitlines()[0]} Lower trainer.micro_token_budget, or train fewer weights (lora.rank=16)"
    is_endless = isinstance(error, RecursionError) and "<template>" in {
        frame.filename for frame in traceback.extract_tb(error.__traceback__)
    }
    if is_endless or type(error).__module__.startswith("jinja2"):
        return f"the tokenizer's chat template fails on these messages: {error}; set tokenizer=PATH to one whose template accepts them"
    return None


def _format_fault(number: int, place: str | None) -> str:
    short = None if place is None else place if len(place) <= 200 else f"{place[:200]}..."
    return f"{_REMEDIES[number]} ({short or os.strerror(number)})"
