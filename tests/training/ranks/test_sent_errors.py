"""Errors of rank 0 on other ranks."""

import errno
import json

import jinja2
import pytest
import torch
from safetensors import SafetensorError

from ludic.errors import DataError, InferenceError, RankError, RequestsExhausted, ServerUnreachableError
from ludic.runs.exit_status import describe_machine_fault, rank_exit_status
from ludic.training.ranks.rendezvous import describe_error, rebuild_error


def test_an_error_is_rebuilt_as_its_nearest_class_that_takes_a_message():
    class OutOfGames(RequestsExhausted):
        pass

    class NeedsMore(InferenceError):
        def __init__(self, message, *, status):
            super().__init__(message)

    for error, kind in (
        (OutOfGames("none"), RequestsExhausted),
        (NeedsMore("none", status=3), InferenceError),
        (DataError("none"), DataError),
        (StopAsyncIteration("none"), StopAsyncIteration),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "none"), UnicodeError),
    ):
        rebuilt = rebuild_error(describe_error(error))
        assert type(rebuilt) is kind
        assert str(rebuilt) == str(error)
        assert rebuilt.__notes__[0].startswith("raised by rank 0, on ")
    assert rebuild_error(describe_error(OutOfGames("none"))).__notes__[0].endswith(", as OutOfGames")
    unknown = rebuild_error(describe_error(KeyboardInterrupt()))
    assert str(unknown).endswith("was interrupted (without a message)")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/rows.jsonl"), 78),
        (PermissionError(errno.EACCES, "Permission denied"), 78),
        (RankError("rank 3 has wrong data", exit_code=78), 78),
        (RankError("rank 3 is gone"), 75),
        (OSError("without a number"), 1),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), 78),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 78),
        (jinja2.TemplateError("roles must alternate"), 78),
        (ServerUnreachableError("no server answers"), 1),
    ],
)
def test_a_rebuilt_error_ends_its_rank_with_the_status_of_rank_0(error, status):
    rebuilt = rebuild_error(json.loads(json.dumps(describe_error(error))))
    assert rank_exit_status(rebuilt) == rank_exit_status(error) == status
    assert (type(rebuilt), str(rebuilt)) == (type(error), str(error))
    assert describe_machine_fault(rebuilt) == describe_machine_fault(OSError(*error.args[:2]) if error.args[1:] else error)


def test_an_error_of_a_class_that_is_known_here_by_name_alone_keeps_its_name_and_status():
    class Overheated(Exception):
        pass

    rebuilt = rebuild_error(json.loads(json.dumps(describe_error(Overheated("90 degrees"), exit_code=1))))
    assert isinstance(rebuilt, RankError)
    assert str(rebuilt).startswith("Overheated on rank 0, on ")
    assert str(rebuilt).endswith(": 90 degrees")
    assert rank_exit_status(rebuilt) == 1
